"use strict";
// What the pages have in common: numbers in words, maps over photographs, colour bars, tabs, and the address.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

// --- words -----------------------------------------------------------------------------------------------------------

const percent = (value) => (value === null ? "" : `${(100 * value).toFixed(1)} %`);
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
// A picture has size [width, height] and window [left, top, right, bottom], the part that the model saw; a map has shape
// [rows, cols], values, and the limits low and high of its colours.

// Where the centres of `length` pixels lie among `count` patches along one side: between which two, and how far.
function between(count, length, size, start, end) {
  return Array.from({ length }, (_, pixel) => {
    const inside = (((pixel + 0.5) / length) * size - start) / (end - start);
    const at = Math.min(Math.max(inside * count - 0.5, 0), count - 1), low = Math.floor(at);
    return { seen: inside >= 0 && inside <= 1, low, high: Math.min(low + 1, count - 1), share: at - low };
  });
}

// The map at every pixel of width × height, bilinear between patch centres; NaN where the model saw nothing.
function spread({ shape: [rows, cols], values }, { size, window: [left, top, right, bottom] }, width, height) {
  const xs = between(cols, width, size[0], left, right), ys = between(rows, height, size[1], top, bottom);
  const out = new Float64Array(width * height).fill(NaN);
  for (let y = 0, pixel = 0; y < height; y++) {
    const v = ys[y], upper = v.low * cols, lower = v.high * cols;
    for (let x = 0; x < width; x++, pixel++) {
      const h = xs[x];
      if (!v.seen || !h.seen) continue;
      const above = values[upper + h.low] * (1 - h.share) + values[upper + h.high] * h.share;
      const below = values[lower + h.low] * (1 - h.share) + values[lower + h.high] * h.share;
      out[pixel] = above * (1 - v.share) + below * v.share;
    }
  }
  return out;
}

// Colours go out from 0 to both sides where 0 lies between the limits.
const tableOf = (tables, { low, high }) => (low < 0 && high > 0 ? tables.two_sides : tables.one_side);

// Where a value stands between the limits, from 0 to 1; where colours go out from 0, each side has its half.
function share(value, { low, high }) {
  const clipped = Math.min(Math.max(value, low), high);
  if (low < 0 && high > 0) return (1 + clipped / (clipped < 0 ? -low : high)) / 2;
  return high > low ? (clipped - low) / (high - low) : 0;
}

// The map in colours on a canvas of width × height, each as opaque as its table says; the canvas as a whole has the
// opacity of the slider.
function drawHeat(canvas, map, picture, tables, width, height) {
  canvas.width = width; canvas.height = height;
  const { colors, opacity } = tableOf(tables, map), steps = colors.length, field = spread(map, picture, width, height);
  const inks = new Uint32Array(Uint8Array.from(colors.flatMap((color, step) => [...color, opacity[step]])).buffer);
  const image = new ImageData(width, height), pixels = new Uint32Array(image.data.buffer);
  for (let k = 0; k < field.length; k++) {
    if (field[k] === field[k]) pixels[k] = inks[Math.min(Math.floor(share(field[k], map) * steps), steps - 1)];
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

// The colours as the overlay shows them, over white and over black.
function drawBar(canvas, tables, map, alpha) {
  const { colors, opacity } = tableOf(tables, map), image = new ImageData(colors.length, 1);
  colors.forEach((color, step) => image.data.set([...color, opacity[step] * alpha], 4 * step));
  canvas.width = colors.length; canvas.height = 1;
  canvas.getContext("2d").putImageData(image, 0, 0);
}

// The colour bar with its limits; the middle of a bar with two sides is 0.
function showScale(box, tables, map, alpha) {
  drawBar(box.querySelector("canvas"), tables, map, alpha);
  box.querySelector(".low").textContent = short(map.low);
  box.querySelector(".high").textContent = short(map.high);
  box.querySelector(".zero").hidden = !(map.low < 0 && map.high > 0);
}

// --- places on the photograph ----------------------------------------------------------------------------------------

// The size at which a picture fits into an element with a margin.
function fit(element, [width, height], margin) {
  const scale = Math.min((element.clientWidth - margin) / width, (element.clientHeight - margin) / height);
  return [Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))];
}

// The patch [row, col] under the pointer, or null where the model saw nothing.
function patchAt(event, frame, { size, window: [left, top, right, bottom] }, [rows, cols]) {
  const box = frame.getBoundingClientRect(), scale = box.width / size[0];
  const col = Math.floor((((event.clientX - box.left) / scale - left) / (right - left)) * cols);
  const row = Math.floor((((event.clientY - box.top) / scale - top) / (bottom - top)) * rows);
  return row >= 0 && row < rows && col >= 0 && col < cols ? [row, col] : null;
}

// Lay an element over a part of the frame, given in pixels of the picture.
function lay(element, { size }, [left, top, right, bottom]) {
  const across = (x) => `${(100 * x) / size[0]}%`, down = (y) => `${(100 * y) / size[1]}%`;
  Object.assign(element.style, { left: across(left), top: down(top), width: across(right - left), height: down(bottom - top) });
}

// Outline a patch, or nothing.
function outline(element, picture, shape, patch) {
  element.hidden = !patch;
  if (!patch) return;
  const [left, top, right, bottom] = picture.window, [rows, cols] = shape;
  const wide = (right - left) / cols, high = (bottom - top) / rows;
  const x = left + patch[1] * wide, y = top + patch[0] * high;
  lay(element, picture, [x, y, x + wide, y + high]);
}

// Bound what the model saw; nothing where it saw the whole picture.
function bound(element, picture) {
  const [left, top, right, bottom] = picture.window, [width, height] = picture.size;
  const seen = [Math.max(left, 0), Math.max(top, 0), Math.min(right, width), Math.min(bottom, height)];
  element.hidden = seen[2] - seen[0] > width - 1 && seen[3] - seen[1] > height - 1;
  lay(element, picture, seen);
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
