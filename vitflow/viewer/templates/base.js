"use strict";
// What the pages have in common: numbers in words, maps over photographs, colour bars, tabs, and the address.

const data = JSON.parse(document.getElementById("data").textContent);
const { knee, kept, luminance } = data.drawing;
const $ = (id) => document.getElementById(id);

// --- words -----------------------------------------------------------------------------------------------------------

const percent = (value) => (value === null ? "" : value < 0.0005 ? "<0.1 %" : `${(100 * value).toFixed(1)} %`);
const minus = (text) => text.replaceAll("-", "−");

// A number as people read it: three digits, or as many as are asked for.
function short(value, digits = 3) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return minus(size < 1e-3 || size >= 1e4 ? value.toExponential(digits - 1) : value.toPrecision(digits));
}

const factsOf = (facts) => Object.entries(facts)
  .map(([name, value]) => `${name.replaceAll("_", " ")}: ${typeof value === "number" ? short(value) : value}`).join(" · ");

// --- a map over its photograph ---------------------------------------------------------------------------------------
// An image has size [width, height], window [left, top, right, bottom], the part that the model saw, and the areas of grids
// that do not fill it, by "rows,columns"; a map has shape
// [rows, cols], values, and the limits low and high of its colours.

const areaOf = (image, [rows, cols]) => image.areas?.[`${rows},${cols}`] ?? image.window;

// For `length` pixels along one side of `count` patches, the nearest patch and the weights of it and its neighbours by the
// quadratic B-spline, which never goes beyond the values; null where the model saw nothing.
function splines(count, length, size, [first, last], [start, end]) {
  return Array.from({ length }, (_, pixel) => {
    const place = ((pixel + 0.5) / length) * size;
    if (place < first || place > last) return null;
    const at = ((place - start) / (end - start)) * count - 0.5, nearest = Math.round(at), beside = at - nearest, held = (patch) => Math.min(Math.max(patch, 0), count - 1);
    return { patches: [held(nearest - 1), held(nearest), held(nearest + 1)], weights: [(0.5 - beside) ** 2 / 2, 0.75 - beside ** 2, (0.5 + beside) ** 2 / 2] };
  });
}

// The map at every pixel of width × height, as vitflow's own overlays spread it; NaN where the model saw nothing.
function spread({ shape: [rows, cols], values }, image, width, height) {
  const { size, window: [left, top, right, bottom] } = image, [x0, y0, x1, y1] = areaOf(image, [rows, cols]);
  const xs = splines(cols, width, size[0], [left, right], [x0, x1]), ys = splines(rows, height, size[1], [top, bottom], [y0, y1]);
  const out = new Float64Array(width * height).fill(NaN), line = new Float64Array(cols);
  for (let y = 0; y < height; y++) {
    if (!ys[y]) continue;
    const { patches: [p, q, r], weights: [u, v, w] } = ys[y];
    for (let col = 0; col < cols; col++) line[col] = u * values[p * cols + col] + v * values[q * cols + col] + w * values[r * cols + col];
    for (let x = 0; x < width; x++) {
      const place = xs[x];
      if (place) out[y * width + x] = place.weights[0] * line[place.patches[0]] + place.weights[1] * line[place.patches[1]] + place.weights[2] * line[place.patches[2]];
    }
  }
  return out;
}

// Colours go out from 0 to both sides where 0 lies between the limits.
const tableOf = (tables, { low, high }) => (low < 0 && high > 0 ? tables.two_sides : tables.one_side);

// From 0 to 1: the share of the way to the limit itself up to the knee, then what nears 1.
function curve(share) {
  if (share <= knee) return Math.max(share, 0);
  return knee < 1 && share < 16 ? knee + (1 - knee) * (1 - Math.exp((knee - share) / (1 - knee))) : 1;
}

// Where the colour of a value stands, from 0 to 1; where colours go out from 0, each side has its half.
function share(value, { low, high }) {
  if (low < 0 && high > 0) return (1 + (value < 0 ? -curve(value / low) : curve(value / high))) / 2;
  return high > low ? curve((value - low) / (high - low)) : 0;
}

// The map in colours on a canvas of width × height, each as opaque as its table says; the canvas as a whole has the
// opacity of the slider.
function drawHeat(canvas, map, image, tables, width, height) {
  canvas.width = width; canvas.height = height;
  const { colors, opacity } = tableOf(tables, map), steps = colors.length, field = spread(map, image, width, height);
  const inks = new Uint32Array(Uint8Array.from(colors.flatMap((color, step) => [...color, opacity[step]])).buffer);
  const raster = new ImageData(width, height), pixels = new Uint32Array(raster.data.buffer);
  for (let k = 0; k < field.length; k++) {
    if (field[k] === field[k]) pixels[k] = inks[Math.min(Math.floor(share(field[k], map) * steps), steps - 1)];
  }
  canvas.getContext("2d").putImageData(raster, 0, 0);
}

// How far a background goes at an opacity of the map: an opacity below 0.5 brings the photograph back.
const strengthOf = (alpha) => Math.min(2 * alpha, 1);

// What a background makes of each colour, as the rows of a matrix.
function backgroundMatrix(name) {
  const [brightness, color] = kept[name];
  return [0, 1, 2].map((to) => luminance.map((part, from) => brightness * ((1 - color) * part + (from === to ? color : 0))));
}

// The filter that the second image of each photograph is drawn through.
function makeBackground(name) {
  const rows = [...backgroundMatrix(name).map((row) => [...row, 0, 0]), [0, 0, 0, 1, 0]];
  $("background").setAttribute("values", rows.flat().join(" "));
}

// Lay the background over its photograph, as far as the model saw it.
function layBackground(element, image, alpha) {
  const [left, top, right, bottom] = image.window, [width, height] = image.size;
  const cut = [top / height, 1 - right / width, 1 - bottom / height, left / width].map((share) => `${Math.max(100 * share, 0)}%`);
  element.hidden = !image.image;
  if (image.image && element.getAttribute("src") !== image.image) element.src = image.image;
  Object.assign(element.style, { clipPath: `inset(${cut.join(" ")})`, opacity: strengthOf(alpha) });
}

// The colours of the values between the limits as the overlay shows them, over what the background makes of white and of black.
function drawBar(canvas, tables, map, alpha) {
  const { colors, opacity } = tableOf(tables, map), width = 256, image = new ImageData(width, 1);
  for (let x = 0; x < width; x++) {
    const value = map.low + ((x + 0.5) / width) * (map.high - map.low), step = Math.min(Math.floor(share(value, map) * colors.length), colors.length - 1);
    image.data.set([...colors[step], opacity[step] * alpha], 4 * x);
  }
  canvas.width = width; canvas.height = 1;
  canvas.getContext("2d").putImageData(image, 0, 0);
}

// The colour bar with its limits; the middle of a bar with two sides is 0.
function showScale(box, tables, map, alpha, background) {
  const [brightness] = kept[background], white = 255 * (1 - strengthOf(alpha) * (1 - brightness));
  box.querySelector(".bar").style.background = `linear-gradient(rgb(${white} ${white} ${white}) 50%, #000 50%)`;
  drawBar(box.querySelector("canvas"), tables, map, alpha);
  box.querySelector(".low").textContent = short(map.low);
  box.querySelector(".high").textContent = short(map.high);
  const two = map.low < 0 && map.high > 0, ends = box.nextElementSibling;
  box.querySelector(".zero").hidden = ends.hidden = !two;
  // What each side stands for, in the words of the map.
  [...ends.children].forEach((end, side) => { end.textContent = (map.ends ?? ["below 0", "above 0"])[side]; });
}

// --- places on the photograph ----------------------------------------------------------------------------------------

// The size at which an image fits into an element with a margin.
function fit(element, [width, height], margin) {
  const scale = Math.min((element.clientWidth - margin) / width, (element.clientHeight - margin) / height);
  return [Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))];
}

// The patch [row, col] under the pointer, or null where the model saw nothing.
function patchAt(event, frame, image, [rows, cols]) {
  const box = frame.getBoundingClientRect(), scale = box.width / image.size[0];
  const x = (event.clientX - box.left) / scale, y = (event.clientY - box.top) / scale;
  const [left, top, right, bottom] = image.window, [x0, y0, x1, y1] = areaOf(image, [rows, cols]);
  if (x < left || x >= right || y < top || y >= bottom) return null;
  const patch = (place, start, end, count) => Math.min(Math.max(Math.floor(((place - start) / (end - start)) * count), 0), count - 1);
  return [patch(y, y0, y1, rows), patch(x, x0, x1, cols)];
}

// Lay an element over a part of the frame, given in pixels of the image.
function lay(element, { size }, [left, top, right, bottom]) {
  const across = (x) => `${(100 * x) / size[0]}%`, down = (y) => `${(100 * y) / size[1]}%`;
  Object.assign(element.style, { left: across(left), top: down(top), width: across(right - left), height: down(bottom - top) });
}

// Outline a patch, or nothing.
function outline(element, image, shape, patch) {
  element.hidden = !patch;
  if (!patch) return;
  const [left, top, right, bottom] = areaOf(image, shape), [rows, cols] = shape;
  const wide = (right - left) / cols, high = (bottom - top) / rows;
  const x = left + patch[1] * wide, y = top + patch[0] * high;
  lay(element, image, [x, y, x + wide, y + high]);
}

// Bound what the model saw; nothing where it saw the whole image.
function bound(element, image) {
  const [left, top, right, bottom] = image.window, [width, height] = image.size;
  const seen = [Math.max(left, 0), Math.max(top, 0), Math.min(right, width), Math.min(bottom, height)];
  element.hidden = seen[2] - seen[0] > width - 1 && seen[3] - seen[1] > height - 1;
  lay(element, image, seen);
}

// What a patch holds, in words.
function readingOf({ shape: [rows, cols], values }, [row, col]) {
  const value = values[row * cols + col], rank = 1 + values.filter((other) => other > value).length;
  return `row ${row}, column ${col}: ${short(value, 4)} — number ${rank} of ${rows * cols} patches`;
}

// --- tabs, keys, address ---------------------------------------------------------------------------------------------

const isField = (element) => element.matches("input, select, textarea") || element.isContentEditable;
const isBare = (event) => !(event.altKey || event.ctrlKey || event.metaKey);

// Tabs that arrow keys step through, and the keys 1 to 9 choose from anywhere.
function wireTabs(list, choose) {
  const tabs = [...list.querySelectorAll("[role=tab]")], usable = () => tabs.filter((tab) => !tab.disabled);
  list.addEventListener("click", (event) => { const tab = event.target.closest("[role=tab]"); if (tab) choose(tab.dataset.name); });
  list.addEventListener("keydown", (event) => {
    const all = usable(), at = all.indexOf(document.activeElement);
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: all.length - 1 }[event.key];
    if (next === undefined || !isBare(event)) return;
    event.preventDefault(); event.stopPropagation();
    const tab = all[(next + all.length) % all.length];
    choose(tab.dataset.name); tab.focus();
  });
  addEventListener("keydown", (event) => {
    const tab = /^[1-9]$/.test(event.key) && isBare(event) && !isField(event.target) ? tabs[event.key - 1] : null;
    if (tab && !tab.disabled) choose(tab.dataset.name);
  });
}

// Show which tab is chosen; one alone is reached by the tabulator key.
function markTab(list, name) {
  for (const tab of list.querySelectorAll("[role=tab]")) {
    tab.setAttribute("aria-selected", String(tab.dataset.name === name));
    tab.tabIndex = tab.dataset.name === name ? 0 : -1;
  }
}

// The part of the address behind "#" as names and values, and back again.
const readAddress = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

function writeAddress(values) {
  const words = new URLSearchParams(values).toString();
  // In a frame without an address of its own there is nothing to write to.
  try { history.replaceState(null, "", words ? `#${words}` : location.pathname + location.search); } catch { /* as it was */ }
}
