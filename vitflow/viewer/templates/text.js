// The page of a text: which word is asked stands in `state`, from which everything on the page is drawn.
const { tokens, rows } = data, count = tokens.length, NUMBERS = 8;
const KINDS = { special: "special tokens", stop: "stop words", punctuation: "punctuation", patch: "patches of images" };
const state = { word: data.first, on: -1, layer: "all", hide: new Set(data.hidden) };
const rowOf = new Map(rows.flatMap((row, number) => row.positions.map((position) => [position, number])));
rows[data.first].positions.forEach((position) => rowOf.set(position, data.first));
const isWritten = (position) => data.written !== null && position >= data.written;
let shares = null; // [rows, layers, tokens]
let maps = []; // of each image, [rows, layers, patches]
let alpha = 0.6;

// --- numbers ---------------------------------------------------------------------------------------------------------

const shareAt = (row, layer, position) => shares[(row * data.layers + layer) * count + position];
const numbered = [...Array(data.layers).keys()];
const layersOfState = () => (state.layer === "mean" ? numbered : [state.layer === "all" ? data.layer : Number(state.layer) - 1]);
const meanOf = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

// What a row has on a token, at the layers that are chosen, or at one.
const held = (row, position, layers = layersOfState()) => meanOf(layers.map((layer) => shareAt(row, layer, position)));
const sharesOf = (row) => tokens.map((token, position) => held(row, position));
// The share that a row's own token has, and stands apart; null where the weights hold it.
const apartOf = (row, layers = layersOfState()) => (rows[row].own ? meanOf(layers.map((layer) => rows[row].own[layer] ?? NaN)) : null);

const figures = [...document.querySelectorAll(".image")], IMAGE = figures.length > 1 ? "the images" : "the image";
const isPatch = (position) => tokens[position].kind === "patch";
const sumOf = (values, counts) => values.reduce((sum, value, position) => sum + (counts(position) ? value : 0), 0);

const isHidden = ({ kind }) => kind === "patch" || state.hide.has(kind);
const asksOf = ({ positions, at }) => [...positions, ...(at === null ? [] : [at])];
// Its own place, where the weights hold it: the word that stands there is no word that it rests on.
const isOwnPlace = (row) => (position) => position === row.at && row.own === null;
const isEarlier = (row) => (position) => isWritten(position) && position !== row.at;

function whole(share) {
  const number = Math.round(100 * share);
  return number === 0 && share > 0 ? "<1" : String(number);
}

const inPercent = (share) => `${whole(share)} %`;

// How even shares are, in words, from their entropy relative to that of equal shares on as many tokens.
function evenness(values) {
  const total = values.reduce((sum, value) => sum + value, 0);
  if (!total || values.length < 2) return "";
  const entropy = -values.reduce((sum, value) => sum + (value > 0 ? (value / total) * Math.log2(value / total) : 0), 0);
  const part = entropy / Math.log2(values.length), told = `entropy ${entropy.toFixed(2)} of ${Math.log2(values.length).toFixed(2)} bits`;
  const words = part > 0.95 ? "nearly even: says little" : part > 0.8 ? "spread over many words" : part > 0.5 ? "some words stand out" : "on few words";
  return `${words} (${told})`;
}

// --- what is asked ---------------------------------------------------------------------------------------------------

const rawShare = (apart, number) => (Number.isNaN(apart) ? "" : `raw share ${number(apart)}`);
const quoted = (text) => `“${text}”`;
const turned = () => state.on >= 0;

// What each token is shown with: its share, and why it has none.
function shown() {
  if (turned()) {
    return tokens.map((token, position) => {
      const row = rowOf.get(position);
      if (position === state.on) return { asked: true };
      if (row === undefined || rows[row].seen <= state.on) return { unseen: true };
      if (rows[row].at === state.on && rows[row].own) return { at: true, apart: apartOf(row) };
      return { value: held(row, state.on), plain: isHidden(token) };
    });
  }
  const row = rows[state.word], own = asksOf(row), apart = apartOf(state.word);
  return tokens.map((token, position) => {
    const asked = row.positions.includes(position), at = position === row.at;
    if (own.includes(position)) return { asked, at, value: position < row.seen && apart === null ? held(state.word, position) : undefined, apart };
    if (position >= row.seen) return { unseen: true };
    return { value: held(state.word, position), plain: isHidden(token) };
  });
}

// --- the text --------------------------------------------------------------------------------------------------------

const labelOf = (position) => tokens[position].text;

function makeText() {
  const box = $("text");
  tokens.forEach((token, position) => {
    if (token.kind === "patch") return;
    if (token.space) box.append(" ");
    const button = document.createElement("button"), word = document.createElement("bdi"), number = document.createElement("span");
    Object.assign(button, { type: "button", className: `token${isWritten(position) ? " written" : ""}`, tabIndex: -1 });
    button.dataset.position = position; word.textContent = token.text; number.className = "share";
    button.append(word, number); box.append(button);
    if (token.newline) box.append(document.createElement("br"));
  });
}

function describe(position, one) {
  const name = quoted(labelOf(position));
  const apart = one.apart ?? null;
  if (apart !== null && (one.at || !isWritten(position))) {
    return [`${name}: left out, as ${one.at ? "the word was written at its place" : "it is the word itself"}`, rawShare(apart, percent)].filter(Boolean).join(", ");
  }
  if (one.value === undefined) return one.asked ? `${name}: the word that is asked about` : `${name}: ${turned() ? "stands before it" : "not seen"}`;
  const by = turned() ? `rests ${percent(one.value)} on ${quoted(labelOf(state.on))}` : percent(one.value);
  return `${name}: ${by}${one.at ? ", its own place" : ""}${one.plain ? ", hidden" : ""}`;
}

function drawText() {
  const found = shown(), counted = found.map((one) => (one.value !== undefined && !one.plain && !one.asked && !one.at ? one.value : 0));
  const top = Math.max(...counted, 0), largest = new Set([...counted.keys()].filter((k) => counted[k] > 0).sort((a, b) => counted[b] - counted[a]).slice(0, NUMBERS));
  for (const button of document.querySelectorAll(".token")) {
    const position = Number(button.dataset.position), one = found[position];
    for (const name of ["asked", "at", "plain", "unseen"]) button.classList.toggle(name, Boolean(one[name]));
    button.style.setProperty("--w", top ? (counted[position] / top).toFixed(3) : "0");
    button.querySelector(".share").textContent = largest.has(position) ? whole(counted[position]) : "";
    button.title = describe(position, one);
    button.setAttribute("aria-pressed", String(Boolean(one.asked)));
    button.tabIndex = one.asked ? 0 : -1;
    button.hidden = tokens[position].kind === "special" && Boolean(one.plain) && !one.asked && !one.at;
  }
  $("legend").textContent = `shade and line: 0 to ${whole(top)} % of ${turned() ? "each word's weight" : "the weight"}; numbers: the largest, in %; outlined: the word that is asked about`
    + (rows.some(({ at }) => at !== null) && !turned() ? "; dashed: where it was written" : "");
  return found;
}

// --- in words --------------------------------------------------------------------------------------------------------

function layerWords() {
  if (state.layer === "mean") return "mean over layers";
  if (state.layer === "all") return data.cumulative ? "all layers" : `layer ${data.layer + 1}`;
  return data.cumulative ? `up to layer ${state.layer}` : `layer ${state.layer}`;
}

// Parts of the weight that lie on kinds of tokens which are hidden, by their names.
function leftOut(values) {
  const sums = {};
  tokens.forEach((token, position) => { if (isHidden(token) && !(isPatch(position) && figures.length) && values[position] > 0) sums[token.kind] = (sums[token.kind] ?? 0) + values[position]; });
  const told = Object.entries(sums).map(([kind, sum]) => `${KINDS[kind]} (${inPercent(sum)} of the weight)`);
  return told.length ? `Not shown: ${told.join(", ")}.` : "";
}

function drawWords(found) {
  const name = turned() ? labelOf(state.on) : rows[state.word].name;
  document.title = `${turned() ? `What rests on ${quoted(name)}` : `What ${quoted(name)} rests on`} · vitflow`;
  $("title").textContent = turned() ? `What rests on ${quoted(name)}` : `What ${quoted(name)} rests on`;
  const parts = [layerWords()];
  if (turned()) {
    const asking = found.map((one, position) => [one.value ?? 0, position]).filter(([value]) => value > 0).sort((a, b) => b[0] - a[0]);
    parts.push(asking.length ? `most of all ${quoted(labelOf(asking[0][1]))}, ${percent(asking[0][0])} of its weight` : "no word rests on it");
    $("left-out").textContent = "";
  } else {
    const values = sharesOf(state.word), row = rows[state.word], { seen } = row, apart = apartOf(state.word);
    if (data.written !== null) {
      const own = sumOf(values, isOwnPlace(row)), prompt = sumOf(values, (position) => !isWritten(position) && position !== row.at);
      const inside = figures.length ? ` (${inPercent(sumOf(values, isPatch))} on ${IMAGE})` : "";
      parts.push(`${inPercent(prompt)} on the prompt${inside}, ${inPercent(sumOf(values, isEarlier(row)))} on earlier written words together`);
      if (own > 0) parts.push(`${inPercent(own)} on its own place`);
    }
    const special = sumOf(values, (position) => tokens[position].kind === "special");
    if (special > 0) parts.push(`${inPercent(special)} on special tokens`);
    if (apart !== null) parts.push(["its own place is left out", rawShare(apart, inPercent)].filter(Boolean).join(", "));
    const even = evenness(values.slice(0, seen).filter((value, position) => !(isPatch(position) && figures.length) && (apart === null || !asksOf(rows[state.word]).includes(position))));
    if (even) parts.push(even);
    $("left-out").textContent = leftOut(values);
  }
  $("told").textContent = `${parts.join(" · ")}.`;
}

// --- layer by layer --------------------------------------------------------------------------------------------------

// The columns of the sheet: tokens of what the word rests on, or words that rest on it; and for each layer their shares.
function columns() {
  if (turned()) {
    return rows.map((row, number) => [row, number]).filter(([row]) => row.seen > state.on && !row.positions.includes(state.on))
      .map(([row, number]) => ({ name: row.name, position: row.positions[0], own: row.at === state.on && Boolean(row.own), at: (layer) => held(number, state.on, [layer]) }));
  }
  const row = rows[state.word], own = asksOf(row), last = Math.min(row.seen, data.written ?? count);
  return tokens.map((token, position) => [token, position]).filter(([token, position]) => position < last && !isHidden(token))
    .map(([token, position]) => ({ name: token.text, position, own: own.includes(position) && Boolean(row.own), asked: own.includes(position), at: (layer) => held(state.word, position, [layer]) }));
}

function cell(tag, text, more = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  return Object.assign(made, more);
}

function drawSheet() {
  const found = columns(), chosen = layersOfState(), sums = [], row = rows[state.word];
  if (!turned() && figures.length) sums.push([IMAGE, isPatch]);
  if (!turned() && data.written !== null && row.seen > data.written) {
    sums.push(["earlier written words", isEarlier(row)]);
    if (!row.own) sums.push(["its own place", isOwnPlace(row)]);
  }
  const top = Math.max(...found.filter((one) => !one.own && !one.asked).flatMap((one) => numbered.map(one.at)), 0), table = document.createElement("table");
  const head = table.createTHead().insertRow();
  head.append(cell("td", ""), ...found.map(({ name }) => { const made = cell("th", "", { scope: "col" }); made.append(cell("bdi", name)); return made; }));
  head.append(...sums.map(([name]) => cell("th", name, { scope: "col" })));
  const body = table.createTBody();
  for (const layer of [...numbered].reverse()) {
    const line = body.insertRow();
    line.dataset.layer = layer + 1;
    line.classList.toggle("chosen", state.layer !== "mean" && chosen.includes(layer));
    line.append(cell("th", `layer ${layer + 1}`, { scope: "row" }));
    for (const one of found) {
      const value = one.at(layer), made = cell("td", one.own ? "" : whole(value), { className: one.own ? "own" : "" });
      made.title = one.own ? `${quoted(one.name)}, layer ${layer + 1}: left out` : `${quoted(one.name)}, layer ${layer + 1}: ${percent(value)}`;
      made.dataset.position = one.position;
      made.style.setProperty("--w", top && !one.own && !one.asked ? Math.min(value / top, 1).toFixed(3) : "0");
      line.append(made);
    }
    const values = sums.length ? tokens.map((token, position) => held(state.word, position, [layer])) : [];
    line.append(...sums.map(([, counts]) => cell("td", whole(sumOf(values, counts)), { className: "sum" })));
  }
  $("sheet-title").textContent = `${turned() ? "Who rests on it" : data.written === null ? "Its row" : "Its prompt"}, layer by layer, in %`;
  $("sheet").replaceChildren(table);
}

// --- on the images -------------------------------------------------------------------------------------------------

// The map of a row on an image, at the layers that are chosen, with the limits of its colours.
function mapOf(number, row) {
  const { grid } = data.images[number], size = grid[0] * grid[1], values = new Float64Array(size), layers = layersOfState();
  for (const layer of layers) {
    const start = (row * data.layers + layer) * size;
    for (let patch = 0; patch < size; patch++) values[patch] += maps[number][start + patch] / layers.length;
  }
  return { shape: grid, values, ...limitsOf(values, data.percentiles) };
}

// The words that have a small map of their own below each image.
const imageRows = [...rows.keys()].filter((row) => tokens[rows[row].positions[0]].kind === "word");

function makeImages() {
  makeBackground(data.drawing.background);
  figures.forEach((figure, number) => {
    const image = data.images[number], strip = figure.querySelector(".strip");
    figure.querySelector(".photo").src = image.image;
    bound(figure.querySelector(".seen"), image);
    for (const row of imageRows) {
      const button = cell("button", "", { type: "button", className: "small" }), frame = cell("span", "", { className: "frame" });
      const photo = cell("img", "", { src: image.image, alt: "" }), ground = cell("img", "", { className: "ground", alt: "" });
      frame.style.aspectRatio = `${image.size[0]} / ${image.size[1]}`;
      frame.append(photo, ground, document.createElement("canvas"));
      button.dataset.row = row; button.append(frame, cell("bdi", rows[row].name)); strip.append(button);
    }
    const frame = figure.querySelector(".stage .frame");
    frame.addEventListener("mousemove", (event) => {
      const map = mapOf(number, state.word), patch = patchAt(event, frame, image, map.shape);
      outline(figure.querySelector(".patch"), image, map.shape, patch);
      figure.querySelector(".reading").textContent = patch ? readingOf(map, patch) : "the model did not see this part";
    });
    frame.addEventListener("mouseleave", () => { figure.querySelector(".patch").hidden = true; figure.querySelector(".reading").textContent = ""; });
    strip.addEventListener("click", (event) => { const button = event.target.closest("button"); if (button) ask(rows[button.dataset.row].positions[0]); });
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
  $("images").hidden = turned();
  if (turned()) return;
  $("opacity").value = Math.round(100 * alpha);
  $("percent").textContent = `${Math.round(100 * alpha)} %`;
  figures.forEach((figure, number) => {
    const image = data.images[number], stage = figure.querySelector(".stage"), frame = stage.querySelector(".frame");
    const map = mapOf(number, state.word), scale = Math.min((stage.clientWidth - 16) / image.size[0], (0.5 * innerHeight) / image.size[1]);
    const [width, height] = image.size.map((side) => Math.max(1, Math.round(side * scale)));
    Object.assign(frame.style, { width: `${width}px`, height: `${height}px` });
    layMap(frame, map, image, width, height);
    showScale(figure.querySelector(".scale"), data.tables, map, alpha, data.drawing.background);
    figure.querySelector(".name").textContent = image.name;
    figure.querySelector(".share").textContent = `${percent(map.values.reduce((sum, value) => sum + value, 0))} of ${quoted(rows[state.word].name)} rests on it`;
    for (const button of figure.querySelectorAll(".small")) {
      const row = Number(button.dataset.row), small = 72 / Math.max(...image.size);
      layMap(button, mapOf(number, row), image, ...image.size.map((side) => Math.max(1, Math.round(side * small))));
      button.setAttribute("aria-pressed", String(row === state.word));
    }
  });
}

// --- all of it -------------------------------------------------------------------------------------------------------

function draw() {
  drawWords(drawText());
  drawSheet();
  drawImages();
  $("reading").textContent = "";
  $("layer").value = state.layer;
  for (const box of document.querySelectorAll("#hide input")) box.checked = state.hide.has(box.value);
  const other = turnedTo();
  $("turn").disabled = other === null;
  $("turn").textContent = turned() ? "What it rests on" : "Who rests on it";
  const values = { ...(turned() ? { on: state.on } : { word: state.word }), layer: state.layer };
  writeAddress({ ...values, ...(state.hide.size ? { hide: [...state.hide].join(",") } : {}) });
}

// Where turning around leads: the row of the token, or the token of the row; null where there is none.
function turnedTo() {
  if (turned()) return rowOf.has(state.on) ? { word: rowOf.get(state.on), on: -1 } : null;
  const position = rows[state.word].positions[0];
  return rows.some(({ seen, positions }) => seen > position && !positions.includes(position)) ? { on: position } : null;
}

// A written or read word is asked what it rests on; one of the prompt, who rests on it.
function ask(position) {
  if (rowOf.has(position)) Object.assign(state, { word: rowOf.get(position), on: -1 });
  else state.on = position;
  draw();
}

function step(by) {
  if (turned()) {
    const able = [...tokens.keys()].filter((position) => tokens[position].kind !== "patch" && rows.some(({ seen }) => seen > position));
    state.on = able[Math.min(Math.max(able.indexOf(state.on) + by, 0), able.length - 1)];
  } else state.word = Math.min(Math.max(state.word + by, 0), rows.length - 1);
  draw();
}

function stepLayer(by) {
  const now = state.layer === "mean" ? data.layers : layersOfState()[0] + 1;
  state.layer = String(Math.min(Math.max(now + (state.layer === "mean" ? 0 : by), 1), data.layers));
  draw();
}

function begin(given) {
  const number = (text, most) => (/^\d+$/.test(text ?? "") && Number(text) < most ? Number(text) : null);
  Object.assign(state, { word: number(given.word, rows.length) ?? data.first, on: number(given.on, count) ?? -1 });
  const layer = number(given.layer, data.layers + 1);
  state.layer = given.layer === "mean" ? "mean" : layer ? String(layer) : "all";
  state.hide = new Set(given.hide === undefined ? data.hidden : given.hide.split(",").filter((kind) => kind in KINDS && kind !== "patch"));
  draw();
}

function wire() {
  const layer = (value, text) => cell("option", text, { value });
  $("layer").append(layer("all", data.cumulative ? "all layers" : `layer ${data.layer + 1}, as asked`), layer("mean", "mean over layers"), ...numbered.map((one) => layer(String(one + 1), data.cumulative ? `up to layer ${one + 1}` : `layer ${one + 1}`)));
  for (const [kind, name] of Object.entries(KINDS)) {
    if (kind === "patch" || !tokens.some((token) => token.kind === kind)) continue;
    const label = cell("label", ""), box = Object.assign(document.createElement("input"), { type: "checkbox", value: kind });
    label.append(box, ` ${name}`); $("hide").append(label);
    box.addEventListener("change", () => { state.hide[box.checked ? "add" : "delete"](kind); draw(); });
  }
  $("hide").hidden = !$("hide").querySelector("input");
  $("layer").addEventListener("change", (event) => { state.layer = event.target.value; draw(); });
  $("turn").addEventListener("click", () => { Object.assign(state, turnedTo() ?? {}); draw(); });
  $("text").addEventListener("click", (event) => { const button = event.target.closest(".token"); if (button) ask(Number(button.dataset.position)); });
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
    const act = { ArrowLeft: () => step(-1), ArrowRight: () => step(1), ArrowUp: () => stepLayer(1), ArrowDown: () => stepLayer(-1),
      m: () => { state.layer = "mean"; draw(); }, a: () => { state.layer = "all"; draw(); }, t: () => { if (!$("turn").disabled) $("turn").click(); } }[event.key];
    if (!act || (event.target.id === "sheet" && ["ArrowLeft", "ArrowRight"].includes(event.key))) return;
    event.preventDefault(); act();
    if (event.target.closest(".token")) document.querySelector(".token.asked:not(.at)")?.focus();
  });
  addEventListener("hashchange", () => begin(readAddress()));
  if (!figures.length) return;
  $("opacity").addEventListener("input", () => { alpha = Number($("opacity").value) / 100; drawImages(); });
  addEventListener("resize", drawImages);
}

Promise.all([data.shares, ...data.images.map((image) => image.maps)].map(unpack)).then(([found, ...others]) => {
  shares = found; maps = others;
  makeText(); makeImages(); wire(); begin(readAddress());
});
