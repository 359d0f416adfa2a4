// Page of a text. `state` holds the selection; `draw` renders the page from it.
const { tokens, rows } = data, count = tokens.length, NUMBERS = 8;
const KINDS = { special: "special tokens", stop: "stop words", punctuation: "punctuation", patch: "image patches" };
const state = { word: data.first, on: -1, layer: "all", hide: new Set(data.hidden) };
const rowOf = new Map(rows.flatMap((row, index) => row.positions.map((position) => [position, index])));
rows[data.first].positions.forEach((position) => rowOf.set(position, data.first));
const isWritten = (position) => data.written !== null && position >= data.written;
let shares = null; // [rows, layers, tokens]
let maps = []; // per image, [rows, layers, patches]
let alpha = 0.75;

// --- numbers ---------------------------------------------------------------------------------------------------------

const shareAt = (row, layer, position) => shares[(row * data.layers + layer) * count + position];
const numbered = [...Array(data.layers).keys()];
const layersOfState = () => (state.layer === "mean" ? numbered : [state.layer === "all" ? data.layer : Number(state.layer) - 1]);
const meanOf = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

// The share of a token in a row, averaged over layers.
const shareOf = (row, position, layers = layersOfState()) => meanOf(layers.map((layer) => shareAt(row, layer, position)));
const sharesOf = (row) => tokens.map((token, position) => shareOf(row, position));
// The raw share of the query token of a row; null if it is among the weights.
const selfShareOf = (row, layers = layersOfState()) => (rows[row].self_share ? meanOf(layers.map((layer) => rows[row].self_share[layer] ?? NaN)) : null);

const figures = [...document.querySelectorAll(".image")], IMAGE = figures.length > 1 ? "the images" : "the image";
const isPatch = (position) => tokens[position].kind === "patch";
const sumOf = (values, counts) => values.reduce((sum, value, position) => sum + (counts(position) ? value : 0), 0);

const isHidden = ({ kind }) => kind === "patch" || state.hide.has(kind);
const markedOf = ({ positions, at }) => [...positions, ...(at === null ? [] : [at])];
// The query token of a row, if its share is among the weights.
const isQuery = (row) => (position) => position === row.at && row.self_share === null;
const isEarlier = (row) => (position) => isWritten(position) && position !== row.at;

function whole(share) {
  const rounded = Math.round(100 * share);
  return rounded === 0 && share > 0 ? "<1" : String(rounded);
}

const inPercent = (share) => `${whole(share)} %`;

// Describe how uniform shares are, by their entropy relative to that of a uniform distribution.
function evenness(values) {
  const total = values.reduce((sum, value) => sum + value, 0);
  if (!total || values.length < 2) return "";
  const entropy = -values.reduce((sum, value) => sum + (value > 0 ? (value / total) * Math.log2(value / total) : 0), 0);
  const ratio = entropy / Math.log2(values.length), bits = `entropy ${entropy.toFixed(2)} of ${Math.log2(values.length).toFixed(2)} bits`;
  const [, label] = data.verdicts.find(([limit]) => ratio > limit || !limit);
  return `${label} (${bits})`;
}

// --- selection -------------------------------------------------------------------------------------------------------

const rawShare = (share, format) => (Number.isNaN(share) ? "" : `raw share ${format(share)}`);
const quoted = (text) => `“${text}”`;
const reversed = () => state.on >= 0; // show the words attributed to the token `state.on`

// The display state of each token: its share, or why it has none.
function shown() {
  if (reversed()) {
    return tokens.map((token, position) => {
      const row = rowOf.get(position);
      if (position === state.on) return { selected: true };
      if (row === undefined || rows[row].seen <= state.on) return { unseen: true };
      if (rows[row].at === state.on && rows[row].self_share) return { at: true, selfShare: selfShareOf(row) };
      return { value: shareOf(row, state.on), plain: isHidden(token) };
    });
  }
  const row = rows[state.word], marked = markedOf(row), selfShare = selfShareOf(state.word);
  return tokens.map((token, position) => {
    const selected = row.positions.includes(position), at = position === row.at;
    if (marked.includes(position)) return { selected, at, value: position < row.seen && selfShare === null ? shareOf(state.word, position) : undefined, selfShare };
    if (position >= row.seen) return { unseen: true };
    return { value: shareOf(state.word, position), plain: isHidden(token) };
  });
}

// --- the text --------------------------------------------------------------------------------------------------------

const labelOf = (position) => tokens[position].text;

function makeText() {
  const box = $("text");
  tokens.forEach((token, position) => {
    if (token.kind === "patch") return;
    if (token.space) box.append(" ");
    const button = document.createElement("button"), word = document.createElement("bdi"), share = document.createElement("span");
    Object.assign(button, { type: "button", className: `token${isWritten(position) ? " written" : ""}`, tabIndex: -1 });
    button.dataset.position = position; word.textContent = token.text; share.className = "share";
    button.append(word, share); box.append(button);
    if (token.newline) box.append(document.createElement("br"));
  });
}

function describe(position, shown) {
  const name = quoted(labelOf(position)), selfShare = shown.selfShare ?? null;
  if (selfShare !== null && (shown.at || !isWritten(position))) {
    return [`${name}: query token, left out`, rawShare(selfShare, percent)].filter(Boolean).join(", ");
  }
  if (shown.value === undefined) return `${name}: ${shown.selected ? "the selected word" : "not seen"}`;
  const share = reversed() ? `${percent(shown.value)} attributed to ${quoted(labelOf(state.on))}` : percent(shown.value);
  return `${name}: ${share}${shown.at ? ", query token" : ""}${shown.plain ? ", hidden" : ""}`;
}

function drawText() {
  const items = shown(), counted = items.map((item) => (item.value !== undefined && !item.plain && !item.selected && !item.at ? item.value : 0));
  const top = Math.max(...counted, 0), largest = new Set([...counted.keys()].filter((k) => counted[k] > 0).sort((a, b) => counted[b] - counted[a]).slice(0, NUMBERS));
  for (const button of document.querySelectorAll(".token")) {
    const position = Number(button.dataset.position), item = items[position];
    for (const name of ["selected", "at", "plain", "unseen"]) button.classList.toggle(name, Boolean(item[name]));
    button.style.setProperty("--w", top ? (counted[position] / top).toFixed(3) : "0");
    button.querySelector(".share").textContent = largest.has(position) ? whole(counted[position]) : "";
    button.title = describe(position, item);
    button.setAttribute("aria-pressed", String(Boolean(item.selected)));
    button.tabIndex = item.selected ? 0 : -1;
    button.hidden = tokens[position].kind === "special" && Boolean(item.plain) && !item.selected && !item.at;
  }
  $("legend").textContent = `shade and line: 0 to ${whole(top)} % of ${reversed() ? "each word's weight" : "the weight"}; numbers: the largest shares, in %; outlined: the selected word`
    + (rows.some(({ at }) => at !== null) && !reversed() ? "; dashed: its query token" : "");
  return items;
}

// --- summary ---------------------------------------------------------------------------------------------------------

function layerLabel() {
  if (state.layer === "mean") return "mean over layers";
  if (state.layer === "all") return data.cumulative ? "all layers" : `layer ${data.layer + 1}`;
  return data.cumulative ? `up to layer ${state.layer}` : `layer ${state.layer}`;
}

// Report the share of the weight on hidden tokens by kind.
function leftOut(values) {
  const sums = {};
  tokens.forEach((token, position) => { if (isHidden(token) && !(isPatch(position) && figures.length) && values[position] > 0) sums[token.kind] = (sums[token.kind] ?? 0) + values[position]; });
  const parts = Object.entries(sums).map(([kind, sum]) => `${KINDS[kind]} (${inPercent(sum)} of the weight)`);
  return parts.length ? `Not shown: ${parts.join(", ")}.` : "";
}

function heading() {
  return reversed() ? `Attribution to ${quoted(labelOf(state.on))}` : `Attribution of ${quoted(rows[state.word].name)}`;
}

function drawSummary(items) {
  $("title").textContent = heading();
  document.title = `${$("title").textContent} · vitflow`;
  const parts = [layerLabel()];
  if (reversed()) {
    const largest = items.map((item, position) => [item.value ?? 0, position]).filter(([value]) => value > 0).sort((a, b) => b[0] - a[0])[0];
    parts.push(largest ? `largest: ${quoted(labelOf(largest[1]))}, ${percent(largest[0])} of its weight` : "no word has weight on it");
    $("left-out").textContent = "";
  } else {
    const values = sharesOf(state.word), row = rows[state.word], { seen } = row, selfShare = selfShareOf(state.word);
    if (data.written !== null) {
      const query = sumOf(values, isQuery(row)), prompt = sumOf(values, (position) => !isWritten(position) && position !== row.at);
      const inside = figures.length ? ` (${inPercent(sumOf(values, isPatch))} on ${IMAGE})` : "";
      parts.push(`${inPercent(prompt)} on the prompt${inside}, ${inPercent(sumOf(values, isEarlier(row)))} on earlier generated words`);
      if (query > 0) parts.push(`${inPercent(query)} on the query token`);
    }
    const special = sumOf(values, (position) => tokens[position].kind === "special");
    if (special > 0) parts.push(`${inPercent(special)} on special tokens`);
    if (selfShare !== null) parts.push(["query token left out", rawShare(selfShare, inPercent)].filter(Boolean).join(", "));
    const even = evenness(values.slice(0, seen).filter((value, position) => !(isPatch(position) && figures.length) && (selfShare === null || !markedOf(row).includes(position))));
    if (even) parts.push(even);
    $("left-out").textContent = leftOut(values);
  }
  $("summary").textContent = `${parts.join(" · ")}.`;
}

// --- table of layers -------------------------------------------------------------------------------------------------

// The columns of the table: tokens with their share in each layer; reversed, the words attributed to the token.
function columns() {
  if (reversed()) {
    return rows.map((row, index) => [row, index]).filter(([row]) => row.seen > state.on && !row.positions.includes(state.on))
      .map(([row, index]) => ({ name: row.name, position: row.positions[0], leftOut: row.at === state.on && Boolean(row.self_share), at: (layer) => shareOf(index, state.on, [layer]) }));
  }
  const row = rows[state.word], marked = markedOf(row), last = Math.min(row.seen, data.written ?? count);
  return tokens.map((token, position) => [token, position]).filter(([token, position]) => position < last && !isHidden(token))
    .map(([token, position]) => ({ name: token.text, position, leftOut: marked.includes(position) && Boolean(row.self_share), marked: marked.includes(position), at: (layer) => shareOf(state.word, position, [layer]) }));
}

function element(tag, text, properties = {}) {
  const node = document.createElement(tag);
  node.textContent = text;
  return Object.assign(node, properties);
}

function drawSheet() {
  const shown = columns(), selected = layersOfState(), sums = [], row = rows[state.word];
  if (!reversed() && figures.length) sums.push([IMAGE, isPatch]);
  if (!reversed() && data.written !== null && row.seen > data.written) {
    sums.push(["earlier generated words", isEarlier(row)]);
    if (!row.self_share) sums.push(["query token", isQuery(row)]);
  }
  const top = Math.max(...shown.filter((column) => !column.leftOut && !column.marked).flatMap((column) => numbered.map(column.at)), 0), table = document.createElement("table");
  const head = table.createTHead().insertRow();
  head.append(element("td", ""), ...shown.map(({ name }) => { const header = element("th", "", { scope: "col" }); header.append(element("bdi", name)); return header; }));
  head.append(...sums.map(([name]) => element("th", name, { scope: "col" })));
  const body = table.createTBody();
  for (const layer of [...numbered].reverse()) {
    const line = body.insertRow();
    line.dataset.layer = layer + 1;
    line.classList.toggle("selected", state.layer !== "mean" && selected.includes(layer));
    line.append(element("th", `layer ${layer + 1}`, { scope: "row" }));
    for (const column of shown) {
      const value = column.at(layer), cell = element("td", column.leftOut ? "" : whole(value), { className: column.leftOut ? "left-out" : "" });
      cell.title = `${quoted(column.name)}, layer ${layer + 1}: ${column.leftOut ? "left out" : percent(value)}`;
      cell.dataset.position = column.position;
      cell.style.setProperty("--w", top && !column.leftOut && !column.marked ? Math.min(value / top, 1).toFixed(3) : "0");
      line.append(cell);
    }
    const values = sums.length ? tokens.map((token, position) => shareOf(state.word, position, [layer])) : [];
    line.append(...sums.map(([, counts]) => element("td", whole(sumOf(values, counts)), { className: "sum" })));
  }
  $("sheet-title").textContent = `${heading()}${reversed() || data.written === null ? "" : " to the prompt"} by layer, in %`;
  $("sheet").replaceChildren(table);
}

// --- images --------------------------------------------------------------------------------------------------------

// The map of a row on an image, averaged over the selected layers, with the limits of its colour scale.
function mapOf(index, row) {
  const { grid } = data.images[index], size = grid[0] * grid[1], values = new Float64Array(size), layers = layersOfState();
  for (const layer of layers) {
    const start = (row * data.layers + layer) * size;
    for (let patch = 0; patch < size; patch++) values[patch] += maps[index][start + patch] / layers.length;
  }
  return { shape: grid, values, ...limitsOf(values, data.percentiles) };
}

// The words with a thumbnail map below each image.
const imageRows = [...rows.keys()].filter((row) => tokens[rows[row].positions[0]].kind === "word");

function makeImages() {
  makeBackground(data.drawing.background);
  figures.forEach((figure, index) => {
    const image = data.images[index], strip = figure.querySelector(".strip");
    figure.querySelector(".photo").src = image.image;
    bound(figure.querySelector(".seen"), image);
    for (const row of imageRows) {
      const button = element("button", "", { type: "button", className: "small" }), frame = element("span", "", { className: "frame" });
      const photo = element("img", "", { src: image.image, alt: "" }), ground = element("img", "", { className: "ground", alt: "" });
      frame.style.aspectRatio = `${image.size[0]} / ${image.size[1]}`;
      frame.append(photo, ground, document.createElement("canvas"));
      button.dataset.row = row; button.append(frame, element("bdi", rows[row].name)); strip.append(button);
    }
    const frame = figure.querySelector(".stage .frame");
    frame.addEventListener("mousemove", (event) => {
      const map = mapOf(index, state.word), patch = patchAt(event, frame, image, map.shape);
      outline(figure.querySelector(".patch"), image, map.shape, patch);
      figure.querySelector(".reading").textContent = patch ? readingOf(map, patch) : "the model did not see this part";
    });
    frame.addEventListener("mouseleave", () => { figure.querySelector(".patch").hidden = true; figure.querySelector(".reading").textContent = ""; });
    strip.addEventListener("click", (event) => { const button = event.target.closest("button"); if (button) select(rows[button.dataset.row].positions[0]); });
  });
}

function layMap(frame, map, image, width, height) {
  const canvas = frame.querySelector("canvas");
  drawHeat(canvas, map, image, data.tables, width, height);
  canvas.style.opacity = alpha;
  layBackground(frame.querySelector(".ground"), image, alpha);
}

function drawImages() {
  if (!figures.length) return;
  $("images").hidden = reversed();
  if (reversed()) return;
  $("opacity").value = Math.round(100 * alpha);
  $("percent").textContent = `${Math.round(100 * alpha)} %`;
  figures.forEach((figure, index) => {
    const image = data.images[index], stage = figure.querySelector(".stage"), frame = stage.querySelector(".frame");
    const map = mapOf(index, state.word), scale = Math.min((stage.clientWidth - 16) / image.size[0], (0.5 * innerHeight) / image.size[1]);
    const [width, height] = image.size.map((side) => Math.max(1, Math.round(side * scale)));
    Object.assign(frame.style, { width: `${width}px`, height: `${height}px` });
    layMap(frame, map, image, width, height);
    showScale(figure.querySelector(".scale"), data.tables, map, alpha, data.drawing.background);
    figure.querySelector(".name").textContent = image.name;
    figure.querySelector(".share").textContent = `${percent(map.values.reduce((sum, value) => sum + value, 0))} of ${quoted(rows[state.word].name)} on this image`;
    for (const button of figure.querySelectorAll(".small")) {
      const row = Number(button.dataset.row), small = 72 / Math.max(...image.size);
      layMap(button, mapOf(index, row), image, ...image.size.map((side) => Math.max(1, Math.round(side * small))));
      button.setAttribute("aria-pressed", String(row === state.word));
    }
  });
}

// --- page ------------------------------------------------------------------------------------------------------------

function draw() {
  drawSummary(drawText());
  drawSheet();
  drawImages();
  $("reading").textContent = "";
  $("layer").value = state.layer;
  for (const box of document.querySelectorAll("#hide input")) box.checked = state.hide.has(box.value);
  $("reverse").disabled = reversedState() === null;
  $("reverse").textContent = `Show attribution ${reversed() ? "of" : "to"} it`;
  const values = { ...(reversed() ? { on: state.on } : { word: state.word }), layer: state.layer };
  writeAddress({ ...values, ...(state.hide.size ? { hide: [...state.hide].join(",") } : {}) });
}

// The state after reversing: the row of the token, or the token of the row; null if there is none.
function reversedState() {
  if (reversed()) return rowOf.has(state.on) ? { word: rowOf.get(state.on), on: -1 } : null;
  const position = rows[state.word].positions[0];
  return rows.some(({ seen, positions }) => seen > position && !positions.includes(position)) ? { on: position } : null;
}

// Select a token: show its row if it has one, else the words attributed to it.
function select(position) {
  if (rowOf.has(position)) Object.assign(state, { word: rowOf.get(position), on: -1 });
  else state.on = position;
  draw();
}

function step(by) {
  if (reversed()) {
    const positions = [...tokens.keys()].filter((position) => tokens[position].kind !== "patch" && rows.some(({ seen }) => seen > position));
    state.on = positions[Math.min(Math.max(positions.indexOf(state.on) + by, 0), positions.length - 1)];
  } else state.word = Math.min(Math.max(state.word + by, 0), rows.length - 1);
  draw();
}

function stepLayer(by) {
  const current = state.layer === "mean" ? data.layers : layersOfState()[0] + 1;
  state.layer = String(Math.min(Math.max(current + (state.layer === "mean" ? 0 : by), 1), data.layers));
  draw();
}

function restore(values) {
  const parse = (text, most) => (/^\d+$/.test(text ?? "") && Number(text) < most ? Number(text) : null);
  Object.assign(state, { word: parse(values.word, rows.length) ?? data.first, on: parse(values.on, count) ?? -1 });
  const layer = parse(values.layer, data.layers + 1);
  state.layer = values.layer === "mean" ? "mean" : layer ? String(layer) : "all";
  state.hide = new Set(values.hide === undefined ? data.hidden : values.hide.split(",").filter((kind) => kind in KINDS && kind !== "patch"));
  draw();
}

function addListeners() {
  const option = (value, text) => element("option", text, { value });
  $("layer").append(option("all", data.cumulative ? "all layers" : `layer ${data.layer + 1}, as requested`), option("mean", "mean over layers"), ...numbered.map((layer) => option(String(layer + 1), data.cumulative ? `up to layer ${layer + 1}` : `layer ${layer + 1}`)));
  for (const [kind, name] of Object.entries(KINDS)) {
    if (kind === "patch" || !tokens.some((token) => token.kind === kind)) continue;
    const label = element("label", ""), box = Object.assign(document.createElement("input"), { type: "checkbox", value: kind });
    label.append(box, ` ${name}`); $("hide").append(label);
    box.addEventListener("change", () => { state.hide[box.checked ? "add" : "delete"](kind); draw(); });
  }
  $("hide").hidden = !$("hide").querySelector("input");
  $("layer").addEventListener("change", (event) => { state.layer = event.target.value; draw(); });
  $("reverse").addEventListener("click", () => { Object.assign(state, reversedState() ?? {}); draw(); });
  $("text").addEventListener("click", (event) => { const button = event.target.closest(".token"); if (button) select(Number(button.dataset.position)); });
  for (const kind of ["mouseover", "focusin"]) {
    $("text").addEventListener(kind, (event) => { const button = event.target.closest(".token"); if (button) $("reading").textContent = button.title; });
  }
  $("sheet").addEventListener("mouseover", (event) => { if (event.target.title) $("reading").textContent = event.target.title; });
  $("sheet").addEventListener("click", (event) => {
    const line = event.target.closest("tr[data-layer]");
    if (line) { state.layer = line.dataset.layer; draw(); }
  });
  addEventListener("keydown", (event) => {
    if (!isBare(event) || isField(event.target)) return;
    const action = { ArrowLeft: () => step(-1), ArrowRight: () => step(1), ArrowUp: () => stepLayer(1), ArrowDown: () => stepLayer(-1),
      m: () => { state.layer = "mean"; draw(); }, a: () => { state.layer = "all"; draw(); }, t: () => { if (!$("reverse").disabled) $("reverse").click(); } }[event.key];
    if (!action || (event.target.id === "sheet" && ["ArrowLeft", "ArrowRight"].includes(event.key))) return;
    event.preventDefault(); action();
    if (event.target.closest(".token")) document.querySelector(".token.selected:not(.at)")?.focus();
  });
  addEventListener("hashchange", () => restore(readAddress()));
  if (!figures.length) return;
  $("opacity").addEventListener("input", () => { alpha = Number($("opacity").value) / 100; drawImages(); });
  addEventListener("resize", drawImages);
}

Promise.all([data.shares, ...data.images.map((image) => image.maps)].map(unpack)).then(([rowShares, ...imageMaps]) => {
  shares = rowShares; maps = imageMaps;
  makeText(); makeImages(); addListeners(); restore(readAddress());
});
