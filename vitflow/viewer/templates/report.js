// The report of a folder run: a gallery, and the picture that is looked at.
const { pictures, tables, alpha, departures } = data, { background, contours } = data.drawing;
const methods = [...document.querySelectorAll("#tabs [role=tab]")].map((tab) => tab.dataset.name);
let method = methods[0], visible = [], current = null;
pictures.forEach((picture, order) => { picture.order = order; });

// Cards of the gallery, drawn when they come into sight.
const sight = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) drawCard(entry.target.picture);
}, { rootMargin: "300px" });

function drawCard(picture) {
  if (picture.drawn === method) return;
  picture.drawn = method;
  const scale = 160 / Math.max(...picture.size), [width, height] = picture.size.map((side) => Math.max(1, Math.round(side * scale)));
  drawHeat(picture.canvas, picture.maps[method], picture, tables, width, height);
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
    const ground = document.createElement("img");
    ground.className = "ground"; ground.alt = ""; ground.loading = "lazy";
    layBackground(ground, picture, alpha);
    inner.append(photo, ground);
  }
  picture.canvas = document.createElement("canvas");
  picture.canvas.style.opacity = alpha;
  inner.append(picture.canvas); frame.append(inner);
  const name = document.createElement("span"), label = document.createElement("span");
  name.className = "name"; name.textContent = picture.name;
  label.className = "class"; label.textContent = [picture.label, percent(picture.probability)].filter(Boolean).join(" · ");
  card.append(frame, name, label);
  card.addEventListener("click", () => { select(picture); bringIn(card); });
  picture.card = card; picture.opacity = alpha;
  sight.observe(card);
}

function select(picture) {
  if (current) current.card.removeAttribute("aria-current");
  current = picture;
  document.querySelector(".viewer").hidden = !picture;
  remember();
  if (!picture) return;
  picture.card.setAttribute("aria-current", "true");
  // Where the picture stays above the gallery, what the reader scrolled to stays, too.
  if (!isNarrow()) picture.card.scrollIntoView({ block: "nearest" });
  show();
}

const isNarrow = () => matchMedia("(max-width: 860px)").matches;

// On a phone the picture covers the upper half: what was tapped comes out from under it.
function bringIn(card) {
  if (!isNarrow()) return;
  card.style.scrollMargin = `${document.querySelector(".big").offsetHeight + 10}px 0 0`;
  card.scrollIntoView({ block: "nearest", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
}

// The address names the picture and the method, so that it can be sent.
function remember() {
  if (!current) return;
  writeAddress({ picture: current.name, ...(method === methods[0] ? {} : { method }) });
}

function show() {
  const picture = current, map = picture.maps[method], [width, height] = fit($("stage"), picture.size, 28);
  $("frame").style.width = `${width}px`; $("frame").style.height = `${height}px`;
  $("photo").hidden = !picture.image;
  if (picture.image) $("photo").src = picture.image;
  drawHeat($("heat"), map, picture, tables, width, height);
  drawContours($("lines"), contours ? map : null, picture, width, height);
  $("patch").hidden = true;
  bound($("seen"), picture);
  $("name").textContent = picture.name;
  $("label").textContent = picture.label;
  $("probability").textContent = percent(picture.probability);
  $("reading").textContent = `${map.shape[0]} × ${map.shape[1]} patches; point at one for its value`;
  $("original").href = picture.link; $("overlay").href = picture.overlays[method] || "";
  $("overlay").hidden = !picture.overlays[method];  // of a run that keeps the maps alone
  $("facts").textContent = factsOf(map.facts);
  $("departs").textContent = departures[method] ?? "";
  markTab($("tabs"), method);
  setOpacity(picture.opacity);
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
  for (const picture of visible) {
    const box = picture.card.getBoundingClientRect();
    if (box.bottom > -300 && box.top < innerHeight + 300) drawCard(picture);
    else { sight.unobserve(picture.card); sight.observe(picture.card); }
  }
  remember();
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
  $("gallery").replaceChildren(...(visible.length ? visible.map((picture) => picture.card) : [nothing()]));
  $("count").textContent = visible.length === pictures.length ? `${visible.length} on this page` : `${visible.length} of ${pictures.length} on this page`;
  select(visible.includes(current) ? current : visible[0] ?? null);
}

// What stands in the gallery where no picture matches.
function nothing() {
  const box = document.createElement("div"), clear = document.createElement("button");
  box.className = "nothing";
  box.append(pictures.length ? "No picture on this page matches the filter." : "No picture was explained.");
  if (!pictures.length) return box;
  clear.type = "button"; clear.className = "button"; clear.textContent = "Clear the filter";
  clear.addEventListener("click", () => { $("tools").reset(); arrange(); $("file").focus(); });
  box.append(document.createElement("br"), clear);
  return box;
}

// The picture and the method that the address names, where they are here.
function recall(address) {
  const picture = visible.find(({ name }) => name === address.picture);
  if (methods.includes(address.method)) choose(address.method);
  if (picture) select(picture);
}

function point(event) {
  const map = current.maps[method], patch = patchAt(event, $("frame"), current, map.shape);
  outline($("patch"), current, map.shape, patch);
  $("reading").textContent = patch ? readingOf(map, patch) : "the model did not see this part";
}

const asked = readAddress();
makeBackground(background);
pictures.forEach(makeCard);
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
