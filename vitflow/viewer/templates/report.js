// The report of a folder run: a gallery, and the image that is looked at.
const { images, tables, alpha, departures } = data, { background } = data.drawing;
const methods = [...document.querySelectorAll("#tabs [role=tab]")].map((tab) => tab.dataset.name);
const MEANS = 12; // classes in the strip of mean maps
let method = methods[0], visible = [], current = null;
images.forEach((image, order) => { image.order = order; });

// A map that does not depend on the class has no more to do with the predicted one.
const labelOf = (image) => `${image.predicted ? "predicted: " : ""}${image.label}`;

// The true class of an image, if it has one and the prediction is another.
function truthOf({ truth, wrong, prediction, label }) {
  const text = wrong ? `true: ${truth}${prediction && prediction !== label ? `, predicted: ${prediction}` : ""}` : "right";
  return Object.assign(document.createElement("span"), { className: `class ${wrong ? "wrong" : "right"}`, textContent: text });
}

// Cards of the gallery, drawn when they come into sight.
const sight = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) drawCard(entry.target.image);
}, { rootMargin: "300px" });

function drawCard(image) {
  if (image.drawn === method) return;
  image.drawn = method;
  const scale = 160 / Math.max(...image.size), [width, height] = image.size.map((side) => Math.max(1, Math.round(side * scale)));
  drawHeat(image.canvas, image.maps[method], image, tables, width, height);
}

function makeCard(image) {
  const card = document.createElement("button"), frame = document.createElement("span"), inner = document.createElement("span");
  card.type = "button"; card.className = "card"; card.image = image; card.title = image.name;
  frame.className = "frame"; inner.className = "inner";
  inner.style.aspectRatio = `${image.size[0]} / ${image.size[1]}`;
  inner.style[image.size[0] / image.size[1] > 4 / 3 ? "width" : "height"] = "100%";
  if (image.image) {
    const photo = document.createElement("img");
    photo.src = image.image; photo.alt = ""; photo.loading = "lazy";
    const ground = document.createElement("img");
    ground.className = "ground"; ground.alt = ""; ground.loading = "lazy";
    layBackground(ground, image, alpha);
    inner.append(photo, ground);
  }
  image.canvas = document.createElement("canvas");
  image.canvas.style.opacity = alpha;
  inner.append(image.canvas); frame.append(inner);
  const name = document.createElement("span"), label = document.createElement("span");
  name.className = "name"; name.textContent = image.name;
  label.className = "class shared";
  label.append(...[labelOf(image), percent(image.probability)].map((textContent) => Object.assign(document.createElement("span"), { textContent })));
  card.append(frame, name, label);
  if ("truth" in image) card.append(truthOf(image));
  card.addEventListener("click", () => { select(image); bringIn(card); });
  image.card = card; image.opacity = alpha;
  sight.observe(card);
}

function select(image) {
  if (current) current.card.removeAttribute("aria-current");
  current = image;
  document.querySelector(".viewer").hidden = !image;
  remember();
  if (!image) return;
  image.card.setAttribute("aria-current", "true");
  // Where the image stays above the gallery, what the reader scrolled to stays, too.
  if (!isNarrow()) image.card.scrollIntoView({ block: "nearest" });
  show();
}

const isNarrow = () => matchMedia("(max-width: 860px)").matches;

// On a phone the image covers the upper half: what was tapped comes out from under it.
function bringIn(card) {
  if (!isNarrow()) return;
  card.style.scrollMargin = `${document.querySelector(".big").offsetHeight + 10}px 0 0`;
  card.scrollIntoView({ block: "nearest", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
}

// The address names the image and the method, so that it can be sent.
function remember() {
  if (!current) return;
  writeAddress({ image: current.name, ...(method === methods[0] ? {} : { method }) });
}

function show() {
  const image = current, map = image.maps[method], [width, height] = fit($("stage"), image.size, 28);
  $("frame").style.width = `${width}px`; $("frame").style.height = `${height}px`;
  $("photo").hidden = !image.image;
  if (image.image) $("photo").src = image.image;
  drawHeat($("heat"), map, image, tables, width, height);
  $("patch").hidden = true;
  bound($("seen"), image);
  $("name").textContent = image.name;
  $("label").textContent = labelOf(image);
  $("probability").textContent = percent(image.probability);
  $("others").replaceChildren(...("truth" in image ? [truthOf(image), " "] : []), image.others.length ? `also ${image.others.map(([name, value]) => `${name} ${percent(value)}`).join(", ")}` : "");
  $("reading").textContent = `${map.shape[0]} × ${map.shape[1]} patches; point at one for its value`;
  $("original").href = image.link; $("overlay").href = image.overlays[method] || "";
  $("overlay").hidden = !image.overlays[method];  // of a run that keeps the maps alone
  $("facts").textContent = factsOf(map.facts);
  $("departs").textContent = departures[method] ?? "";
  markTab($("tabs"), method);
  setOpacity(image.opacity);
}

function setOpacity(value) {
  current.opacity = value;
  $("heat").style.opacity = value;
  layBackground($("ground"), current, value);
  $("opacity").value = Math.round(100 * value);
  $("percent").textContent = `${Math.round(100 * value)} %`;
  showScale($("scale"), tables, current.maps[method], value, background);
}

function choose(name) {
  method = name;
  for (const image of visible) {
    const box = image.card.getBoundingClientRect();
    if (box.bottom > -300 && box.top < innerHeight + 300) drawCard(image);
    else { sight.unobserve(image.card); sight.observe(image.card); }
  }
  remember();
  drawMeans();
  if (current) show();
}

// The mean map of each class that is predicted for at least two images of the page, each map with the same weight.
function drawMeans() {
  const groups = Map.groupBy(images.filter(({ prediction }) => prediction), ({ prediction }) => prediction);
  const means = [...groups].map(([name, members]) => ({ name, maps: members.map(({ maps }) => maps[method]).filter(Boolean) }))
    .map(({ name, maps }) => ({ name, maps: maps.filter(({ shape }) => String(shape) === String(maps[0].shape)) }))
    .filter(({ maps }) => maps.length > 1).sort((a, b) => b.maps.length - a.maps.length).slice(0, MEANS);
  $("means").hidden = !means.length;
  $("strip").replaceChildren(...means.map(({ name, maps }) => {
    const shape = maps[0].shape, size = [16 * shape[1], 16 * shape[0]], values = new Float64Array(shape[0] * shape[1]);
    for (const map of maps) {
      const total = map.values.reduce((sum, value) => sum + Math.abs(value), 0) || 1;
      map.values.forEach((value, at) => { values[at] += value / total / maps.length; });
    }
    const low = Math.min(...values), high = Math.max(...values), most = Math.max(-low, high);
    const button = document.createElement("button"), canvas = document.createElement("canvas"), caption = document.createElement("span");
    button.type = "button"; button.className = "mean"; button.title = `Show the images of ${name}`;
    drawHeat(canvas, { shape, values, low: low < 0 ? -most : low, high: low < 0 ? most : high }, { size, window: [0, 0, ...size] }, tables, ...size);
    caption.textContent = `${name} · ${maps.length}`;
    button.append(canvas, caption);
    button.addEventListener("click", () => { $("class").value = $("class").value === name ? "" : name; arrange(); });
    return button;
  }));
}

function arrange() {
  const text = $("file").value.toLowerCase(), label = $("class").value;
  const least = Number($("least").value || 0) / 100, most = Number($("most").value || 100) / 100;
  const down = $("sort").value.startsWith("-"), key = $("sort").value.replace("-", "");
  visible = images.filter((image) => image.name.toLowerCase().includes(text) && (!label || image.label === label)
    && (image.probability === null || (image.probability >= least && image.probability <= most)));
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b);
  const rank = (image) => (key === "wrong" ? (image.wrong ? 1 + (image.probability ?? 0) : 0) : image[key] ?? 0); // the surest first
  visible.sort((a, b) => (down ? -1 : 1) * compare(rank(a), rank(b)) || a.order - b.order);
  $("gallery").replaceChildren(...(visible.length ? visible.map((image) => image.card) : [nothing()]));
  $("count").textContent = visible.length === images.length ? `${visible.length} on this page` : `${visible.length} of ${images.length} on this page`;
  select(visible.includes(current) ? current : visible[0] ?? null);
}

// What stands in the gallery where no image matches.
function nothing() {
  const box = document.createElement("div"), clear = document.createElement("button");
  box.className = "nothing";
  box.append(images.length ? "No image on this page matches the filter." : "No image was explained.");
  if (!images.length) return box;
  clear.type = "button"; clear.className = "button"; clear.textContent = "Clear the filter";
  clear.addEventListener("click", () => { $("tools").reset(); arrange(); $("file").focus(); });
  box.append(document.createElement("br"), clear);
  return box;
}

// The image and the method that the address names, where they are here.
function recall(address) {
  const image = visible.find(({ name }) => name === address.image);
  if (methods.includes(address.method)) choose(address.method);
  if (image) select(image);
}

function point(event) {
  const map = current.maps[method], patch = patchAt(event, $("frame"), current, map.shape);
  outline($("patch"), current, map.shape, patch);
  $("reading").textContent = patch ? readingOf(map, patch) : "the model did not see this part";
}

const asked = readAddress();
makeBackground(background);
images.forEach(makeCard);
drawMeans();
arrange();
recall(asked);
$("tools").addEventListener("input", arrange);
$("tools").addEventListener("submit", (event) => event.preventDefault());
$("opacity").addEventListener("input", () => setOpacity(Number($("opacity").value) / 100));
wireTabs($("tabs"), choose);
$("frame").addEventListener("mousemove", point);
$("frame").addEventListener("mouseleave", () => { if (current) show(); });
addEventListener("resize", () => { if (current) show(); });
addEventListener("hashchange", () => recall(readAddress()));
addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  // In a field or on the slider, the arrows are its own.
  if (!step || isField(event.target) || !isBare(event) || !visible.length) return;
  event.preventDefault();
  select(visible[Math.min(Math.max(visible.indexOf(current) + step, 0), visible.length - 1)]);
  bringIn(current.card);
});
