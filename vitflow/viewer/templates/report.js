"use strict";
const { pictures, tables, alpha } = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const methods = [...document.querySelectorAll("#tabs button")].map((tab) => tab.dataset.method);
let method = methods[0], visible = [], current = null;
pictures.forEach((picture, order) => { picture.order = order; });

// The heat of one picture on a canvas of width × height: bilinear between patch centres, as vitflow's own overlays;
// each colour has the opacity of its table, and the canvas as a whole has the opacity of the slider.
function drawHeat(canvas, picture, width, height) {
  canvas.width = width; canvas.height = height;
  const map = picture.maps[method], [rows, cols] = map.shape;
  const [left, top, right, bottom] = picture.window, { colors, opacity } = tables[map.table];
  const image = new ImageData(width, height), data = image.data;
  const steps = (count, length, size, start, end) => Array.from({ length }, (_, k) => {
    const inside = (((k + 0.5) / length) * size - start) / (end - start);
    const at = Math.min(Math.max(inside * count - 0.5, 0), count - 1), low = Math.floor(at);
    return { seen: inside >= 0 && inside <= 1, low, high: Math.min(low + 1, count - 1), share: at - low };
  });
  const xs = steps(cols, width, picture.size[0], left, right), ys = steps(rows, height, picture.size[1], top, bottom);
  for (let y = 0, pixel = 0; y < height; y++) {
    const v = ys[y];
    for (let x = 0; x < width; x++, pixel += 4) {
      const h = xs[x];
      if (!v.seen || !h.seen) continue;
      const above = map.values[v.low * cols + h.low] * (1 - h.share) + map.values[v.low * cols + h.high] * h.share;
      const below = map.values[v.high * cols + h.low] * (1 - h.share) + map.values[v.high * cols + h.high] * h.share;
      const value = above * (1 - v.share) + below * v.share;
      const index = Math.min(Math.floor(share(value, map) * colors.length), colors.length - 1), color = colors[index];
      data[pixel] = color[0]; data[pixel + 1] = color[1]; data[pixel + 2] = color[2]; data[pixel + 3] = opacity[index];
    }
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

// Where a value stands between the limits, from 0 to 1; where colours go out from 0, each side has its half.
function share(value, { low, high, table }) {
  const clipped = Math.min(Math.max(value, low), high);
  if (table === "two_sides") return (1 + clipped / (clipped < 0 ? -low : high)) / 2;
  return high > low ? (clipped - low) / (high - low) : 0;
}

function drawBar({ colors }) {
  $("bar").width = colors.length;
  const bar = $("bar").getContext("2d");
  colors.forEach(([red, green, blue], index) => { bar.fillStyle = `rgb(${red},${green},${blue})`; bar.fillRect(index, 0, 1, 1); });
}

const percent = (value) => (value === null ? "" : `${(100 * value).toFixed(1)} %`);
const short = (value) => (value === 0 ? "0" : Math.abs(value) < 1e-3 || Math.abs(value) >= 1e4 ? value.toExponential(2) : value.toPrecision(3));

// Cards of the gallery, drawn when they come into sight.
const sight = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) drawCard(entry.target.picture);
}, { rootMargin: "300px" });

function drawCard(picture) {
  if (picture.drawn === method) return;
  picture.drawn = method;
  const scale = 160 / Math.max(...picture.size);
  drawHeat(picture.canvas, picture, Math.max(1, Math.round(picture.size[0] * scale)), Math.max(1, Math.round(picture.size[1] * scale)));
}

function makeCard(picture) {
  const card = document.createElement("button"), frame = document.createElement("span"), inner = document.createElement("span");
  card.type = "button"; card.className = "card"; card.picture = picture; card.title = picture.name;
  frame.className = "frame"; inner.className = "inner";
  inner.style.aspectRatio = `${picture.size[0]} / ${picture.size[1]}`;
  inner.style[picture.size[0] / picture.size[1] > 4 / 3 ? "width" : "height"] = "100%";
  if (picture.image) {
    const photo = document.createElement("img");
    photo.src = picture.image; photo.alt = ""; photo.loading = "lazy";
    inner.append(photo);
  }
  picture.canvas = document.createElement("canvas");
  picture.canvas.style.opacity = alpha;
  inner.append(picture.canvas); frame.append(inner);
  const name = document.createElement("span"), label = document.createElement("span");
  name.className = "name"; name.textContent = picture.name;
  label.className = "class"; label.textContent = [picture.label, percent(picture.probability)].filter(Boolean).join(" · ");
  card.append(frame, name, label);
  card.addEventListener("click", () => select(picture));
  picture.card = card; picture.opacity = alpha;
  sight.observe(card);
}

function select(picture) {
  if (current) current.card.removeAttribute("aria-current");
  current = picture;
  document.querySelector(".viewer").hidden = !picture;
  if (!picture) return;
  picture.card.setAttribute("aria-current", "true");
  // Where the viewer stands above the gallery, it would be scrolled away.
  if (matchMedia("(min-width: 861px)").matches) picture.card.scrollIntoView({ block: "nearest" });
  show();
}

function show() {
  const picture = current, map = picture.maps[method], frame = $("frame"), stage = $("stage");
  const room = [stage.clientWidth - 28, stage.clientHeight - 28];
  const scale = Math.min(room[0] / picture.size[0], room[1] / picture.size[1]);
  const width = Math.max(1, Math.round(picture.size[0] * scale)), height = Math.max(1, Math.round(picture.size[1] * scale));
  frame.style.width = `${width}px`; frame.style.height = `${height}px`;
  $("photo").hidden = !picture.image;
  if (picture.image) $("photo").src = picture.image;
  drawHeat($("heat"), picture, width, height);
  drawBar(tables[map.table]);
  $("patch").hidden = true;
  $("name").textContent = picture.name;
  $("label").textContent = picture.label;
  $("probability").textContent = percent(picture.probability);
  $("low").textContent = short(map.low); $("high").textContent = short(map.high);
  $("reading").textContent = `${map.shape[0]} × ${map.shape[1]} patches; point at one for its value`;
  $("original").href = picture.link; $("overlay").href = picture.overlays[method] || "";
  $("overlay").hidden = !picture.overlays[method];  // of a run that keeps the maps alone
  $("facts").textContent = Object.entries(map.facts).map(([name, value]) => `${name.replaceAll("_", " ")}: ${typeof value === "number" ? short(value) : value}`).join(" · ");
  for (const tab of document.querySelectorAll("#tabs button")) tab.setAttribute("aria-selected", String(tab.dataset.method === method));
  setOpacity(picture.opacity);
}

function setOpacity(value) {
  current.opacity = value;
  $("heat").style.opacity = value;
  $("opacity").value = Math.round(100 * value);
  $("percent").textContent = `${Math.round(100 * value)} %`;
}

function choose(name) {
  method = name;
  for (const picture of visible) {
    const box = picture.card.getBoundingClientRect();
    if (box.bottom > -300 && box.top < innerHeight + 300) drawCard(picture);
    else { sight.unobserve(picture.card); sight.observe(picture.card); }
  }
  if (current) show();
}

function arrange() {
  const text = $("file").value.toLowerCase(), label = $("class").value;
  const least = Number($("least").value || 0) / 100, most = Number($("most").value || 100) / 100;
  const down = $("sort").value.startsWith("-"), key = $("sort").value.replace("-", "");
  visible = pictures.filter((picture) => picture.name.toLowerCase().includes(text) && (!label || picture.label === label)
    && (picture.probability === null || (picture.probability >= least && picture.probability <= most)));
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b);
  visible.sort((a, b) => (down ? -1 : 1) * compare(a[key] ?? 0, b[key] ?? 0) || a.order - b.order);
  $("gallery").replaceChildren(...visible.map((picture) => picture.card));
  $("count").textContent = visible.length === pictures.length ? `${visible.length} on this page` : `${visible.length} of ${pictures.length} on this page`;
  select(visible.includes(current) ? current : visible[0] ?? null);
}

function point(event) {
  const picture = current, map = picture.maps[method], [rows, cols] = map.shape, box = $("frame").getBoundingClientRect();
  const [left, top, right, bottom] = picture.window, scale = box.width / picture.size[0];
  const col = Math.floor(((((event.clientX - box.left) / scale) - left) / (right - left)) * cols);
  const row = Math.floor(((((event.clientY - box.top) / scale) - top) / (bottom - top)) * rows);
  const patch = $("patch"), inside = row >= 0 && row < rows && col >= 0 && col < cols;
  patch.hidden = !inside;
  if (!inside) { $("reading").textContent = "the model did not see this part"; return; }
  const width = ((right - left) / cols) * scale, height = ((bottom - top) / rows) * scale;
  Object.assign(patch.style, { left: `${left * scale + col * width}px`, top: `${top * scale + row * height}px`, width: `${width}px`, height: `${height}px` });
  const value = map.values[row * cols + col], rank = 1 + map.values.filter((other) => other > value).length;
  $("reading").textContent = `row ${row}, column ${col}: ${value === 0 ? "0" : value.toPrecision(4)} — number ${rank} of ${rows * cols} patches`;
}

pictures.forEach(makeCard);
arrange();
$("tools").addEventListener("input", arrange);
$("tools").addEventListener("submit", (event) => event.preventDefault());
$("opacity").addEventListener("input", () => setOpacity(Number($("opacity").value) / 100));
$("tabs").addEventListener("click", (event) => { if (event.target.dataset.method) choose(event.target.dataset.method); });
$("frame").addEventListener("mousemove", point);
$("frame").addEventListener("mouseleave", () => { if (current) show(); });
addEventListener("resize", () => { if (current) show(); });
addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  // In a field or on the slider, the arrows are its own.
  if (!step || event.target.matches("input, select") || event.altKey || event.ctrlKey || event.metaKey || !visible.length) return;
  event.preventDefault();
  select(visible[Math.min(Math.max(visible.indexOf(current) + step, 0), visible.length - 1)]);
});
