// The explorer: `state` holds the selection, from which everything on the page is drawn.
const { images, tables, call, methods, percentiles } = data;
const colourMaps = data.cmaps, $$ = (selector) => [...document.querySelectorAll(selector)];
const LIVE = ["rollout", "attention", "similarity"];
const ready = [...new Set(images.flatMap(({ maps }) => maps.map(({ method }) => method)))];
const computes = images.some(({ attention }) => Object.keys(attention).length), hasFeatures = images.some(({ features }) => features);
const fusedSets = computes ? images.map(({ attention }) => Object.keys(attention)).find((names) => names.length) : [];
const matters = images.some(({ deletion }) => deletion.length);
if (matters) methods[MATTERS] = { title: "Does it matter?", defaults: {}, published: null, signed: false };
const modes = [...(computes ? ["rollout", "attention"] : []), ...(hasFeatures ? ["similarity"] : []), ...ready.filter((name) => !(name === "similarity" ? hasFeatures : computes && LIVE.includes(name))), ...(matters ? [MATTERS] : [])];
// The map to begin with: that of the output.
const first = modes.find((mode) => mode === "gae") ?? modes.find((mode) => mode === "rollout") ?? modes[0];
let from = null; // the map of the output in which a patch was clicked, to which Escape returns
const titleOf = (mode) => methods[mode].title;

// What a map begins with: the method's own options, as far as the page holds what they need.
function initialOf(map) {
  const own = { ...methods.rollout.defaults, ...methods[map]?.defaults }, refinable = images[0].affinities.attention && !images[0].uniform;
  const found = {
    map, a: 0, b: images.length > 1 ? 1 : -1, patch: "", patchb: "", query: "a", class: "",
    start: own.start_layer, end: data.layers, layer: data.layers, head: "",
    head_fusion: own.head_fusion, value_weighted: Boolean(own.value_weighted), discard_ratio: own.discard_ratio, residual: own.residual,
    refine: refinable ? own.refine : 0, affinity: own.affinity, less: false, opacity: 0.75, cmap: colourMaps[0], background: data.drawing.background, removed: 0,
  };
  return fusedSets.length && !fusedSets.includes(setName(found)) ? { ...found, ...setOf(fusedSets[0]) } : found;
}

const state = initialOf(first);
const sides = ["a", "b"], panels = {};
let drawn = 0; // which drawing is the latest
let invited = !location.hash; // until the reader asks something, the photograph says what a click does

function setName({ head_fusion, value_weighted }) { return `${head_fusion} ${value_weighted ? "weighted" : "plain"}`; }

function setOf(name) {
  const [fusion, weighting] = name.split(" ");
  return { head_fusion: fusion, value_weighted: weighting === "weighted" };
}

// --- selection -------------------------------------------------------------------------------------------------------

const imageOf = (side) => images[state[side]];
const patchKey = (side) => (side === "a" ? "patch" : "patchb");
const isLive = () => modes.includes(state.map) && LIVE.includes(state.map) && (state.map === "similarity" ? hasFeatures : computes);
const mapsOf = (image, mode) => (mode === MATTERS ? image.deletion : image.maps.filter(({ method }) => method === mode));

// The map that a click on a patch of this one shows, or null.
const liveOf = (image) => (isLive() ? state.map : state.map === MATTERS ? null : computes && image.grid ? "rollout" : image.features ? "similarity" : null);

// The patch grid of an image.
function gridOf(image) {
  if (state.map === "similarity") return image.features?.grid ?? null;
  return isLive() ? image.grid : mapsOf(image, state.map)[0]?.shape ?? null;
}

// The selected patch [row, col], or null for the whole output.
function queryPatch(side) {
  const image = imageOf(side), grid = gridOf(image), [row, col] = state[patchKey(side)].split(",").map(Number);
  const given = state[patchKey(side)] && grid && row < grid[0] && col < grid[1];
  if (given) return [row, col];
  return state.map === "similarity" && grid && side === state.query ? grid.map((count) => Math.floor(count / 2)) : null;
}

// Why a map cannot be had of an image, or null.
function refusal(image) {
  if (state.map === "similarity") return image.features ? null : image.refused.features;
  if (!isLive()) return mapsOf(image, state.map).length ? null : (state.map === MATTERS && image.refused.deletion) || "This map was not made for this photograph.";
  return image.grid ? null : image.refused.live;
}

// Why a click on a patch asks nothing, or null where it does.
function silence() {
  if (state.map === MATTERS) return "Move the slider to remove patches.";
  return liveOf(imageOf("a")) ? null : `${titleOf(state.map)} was computed for the whole output and is not available for a single patch.`;
}

// --- maps ------------------------------------------------------------------------------------------------------------

// The layers of an image's fused attention after discarding; computed on first use.
async function layersOf(image, name, ratio) {
  const packed = image.attention[name], values = await unpack(packed), [count, tokens] = packed.shape;
  const known = packed.kept;
  if (known?.ratio === ratio) return known.layers;
  const layers = Array.from({ length: count }, (_, layer) =>
    discardLow(values.subarray(layer * tokens ** 2, (layer + 1) * tokens ** 2), tokens, image.prefix, ratio));
  packed.kept = { ratio, layers };
  return layers;
}

async function headOf(image, layer, head, ratio) {
  const values = await unpack(image.heads), tokens = image.heads.shape[1], at = ((layer - 1) * data.heads + head - 1) * tokens ** 2;
  return discardLow(values.subarray(at, at + tokens ** 2), tokens, image.prefix, ratio);
}

function readoutOf(image, patch) {
  const readout = Float64Array.from(image.readout);
  return patch ? readout.fill(0).fill(1, ...[0, 1].map((more) => image.prefix + patch[0] * image.grid[1] + patch[1] + more)) : readout;
}

// Affinities of the layers from start on, of which rollout takes those that it multiplies, and other maps all.
async function affinitiesOf(image, start) {
  const names = state.affinity === "both" ? ["attention", "keys"] : [state.affinity], size = image.grid[0] * image.grid[1];
  return Promise.all(names.map(async (name) => {
    const packed = image.affinities[name][start - 1];
    packed.balanced ??= balance(symmetric(await unpack(packed), size), size);
    return packed.balanced;
  }));
}

// What is refined as it is, and what without its negative values.
const SPREAD = ["after", "after_clamping"];

// Whether the map is refined by the browser.
function refines(image) {
  const kind = mapsOf(image, state.map)[0]?.refine_stage;
  const names = state.affinity === "both" ? ["attention", "keys"] : [state.affinity];
  return state.refine > 0 && !["similarity", MATTERS].includes(state.map) && image.grid && names.every((name) => image.affinities[name]) && (isLive() || SPREAD.includes(kind));
}

async function refined(image, map, start = 1) {
  if (!refines(image) || map.length !== image.grid[0] * image.grid[1]) return map;
  return refine(map, await affinitiesOf(image, start), state.refine);
}

// The map of one side, as values over its patches, with those of the layers below it, if there are any. The map
// of a patch is compared with that of the whole output, and may be shown minus it.
async function compute(side) {
  const image = imageOf(side), patch = queryPatch(side), own = await computeFor(image, side, patch);
  if (!patch || !isLive() || state.map === "similarity") return own;
  const whole = await wholeOf(image, side), agreement = correlation(own.values, whole.values);
  if (!state.less) return { ...own, agreement };
  const layers = async (layer) => less(await own.layers(layer), await whole.layers(layer));
  return { ...own, agreement, values: less(own.values, whole.values), layers, ends: ["more in the model output's map", "more in the patch's map"] };
}

// Map of the whole output, for comparison with that of a patch; cached until another setting changes.
const wholes = new Map();

function wholeOf(image, side) {
  const query = JSON.stringify({ ...state, patch: "", patchb: "", query: "", less: false, opacity: 0, cmap: "", background: "", removed: 0 });
  if (wholes.get(image)?.query !== query) wholes.set(image, { query, map: computeFor(image, side, null) });
  return wholes.get(image).map;
}

async function computeFor(image, side, patch) {
  const grid = gridOf(image);
  if (state.map === "similarity") return { shape: grid, values: await similar(side), layers: null };
  if (!isLive()) {
    const maps = mapsOf(image, state.map), own = maps.find(({ label }) => label === state.class) ?? maps[0];
    if (state.map === MATTERS) return { shape: own.shape, values: stepsOf(own), layers: null, own };
    return { shape: own.shape, values: await refined(image, Float64Array.from(own.values, (value) => (own.refine_stage === "after_clamping" && refines(image) ? Math.max(value, 0) : value))), layers: null, own, ends: own.ends };
  }
  const readout = readoutOf(image, patch), patches = (row, start) => refined(image, row.slice(image.prefix), start);
  if (state.map === "attention" && state.head !== "") {
    const raw = (layer) => headOf(image, layer, Number(state.head), state.discard_ratio).then((own) => patches(rawAttention(own, readout)));
    return { shape: grid, values: await raw(state.layer), layers: raw };
  }
  const layers = await layersOf(image, setName(state), state.discard_ratio);
  if (state.map === "attention") {
    const raw = (layer) => patches(rawAttention(layers[layer - 1], readout));
    return { shape: grid, values: await raw(state.layer), layers: raw };
  }
  const { row } = rollout(layers, readout, state);
  let steps = null; // down to the first layer, when the strip asks for them
  const below = (layer) => { steps ??= rollout(layers, readout, { ...state, start: 1 }).steps; return patches(steps.get(layer), layer); };
  return { shape: grid, values: await patches(row, state.start), layers: below };
}

// Similarity of the patches of a side to the selected patch, on either side.
async function similar(side) {
  const [own, query] = [imageOf(side), imageOf(state.query)].map(({ features }) => features), [row, col] = queryPatch(state.query);
  const [vectors, theirs] = await Promise.all([unpack(own), unpack(query)]), width = own.shape[1], at = (row * query.grid[1] + col) * width;
  return cosines(vectors, width, theirs.subarray(at, at + width));
}

// --- drawing ---------------------------------------------------------------------------------------------------------

async function update() {
  const number = ++drawn, shown = sides.filter((side) => imageOf(side));
  if (!shown.includes(state.query)) state.query = "a";
  const usual = { ...initialOf(state.map), map: first };
  writeAddress(Object.fromEntries(Object.entries(state).filter(([name, value]) => value !== usual[name])));
  showControls();
  makeBackground(state.background);
  $("panel-b").hidden = !shown.includes("b");
  const whys = shown.map((side) => refusal(imageOf(side)));
  const maps = await Promise.all(shown.map((side, at) => (whys[at] ? null : compute(side))));
  if (number !== drawn) return; // the selection has changed meanwhile
  // Similarity to one patch has one scale, wherever it is shown.
  const all = state.map === "similarity" ? Float64Array.from(maps.flatMap((map) => [...(map?.values ?? [])])) : null;
  shown.forEach((side, at) => {
    const map = maps[at];
    if (map) Object.assign(map, limitsOf(all ?? map.values, percentiles, methods[state.map].signed));
    panels[side].map = map;
    showPanel(side, whys[at]);
  });
  const around = maps.some((map) => map && map.low < 0 && map.high > 0);
  document.querySelector('[data-name="cmap"]').options[0].text = around ? "blue to red" : colourMaps[0];
  requestAnimationFrame(() => setTimeout(() => { if (number === drawn) showStrip(); }));
}

function showPanel(side, why) {
  const panel = panels[side], { map } = panel, image = imageOf(side), removing = state.map === MATTERS;
  panel.matters.hidden = !(map && removing); // before the stage is measured, which then is lower
  const [width, height] = fit(panel.stage, image.size, 28);
  layBackground(panel.ground, image, state.opacity);
  panel.frame.style.width = `${width}px`; panel.frame.style.height = `${height}px`;
  if (panel.photo.src !== image.image) panel.photo.src = image.image;
  panel.name.textContent = images.length > 1 ? image.name : "";
  panel.answers.textContent = image.answers.slice(0, 2).map(({ name, probability }) => `${name} ${percent(probability)}`).join(" · ");
  bound(panel.seen, image);
  const patch = map && queryPatch(side);
  outline(panel.query, image, gridOf(image) ?? [1, 1], (isLive() && (state.map !== "similarity" || side === state.query)) ? patch : null);
  panel.from.textContent = why ?? wordsOf(side);
  panel.comparison.hidden = map?.agreement === undefined;
  if (!panel.comparison.hidden) {
    panel.correlation.textContent = `Correlation with the map of the model output: ${minus(map.agreement.toFixed(2))}. `;
    panel.less.textContent = state.less ? "Show the map itself" : "Show the difference";
  }
  panel.departs.textContent = map ? departuresOf(side) : "";
  panel.message.hidden = !(invited && liveOf(image) && side === "a");
  if (!panel.message.hidden) panel.message.textContent = state.map === "similarity" ? "Click a patch to see which others are similar." : "Click a patch to see its attention.";
  panel.frame.classList.toggle("silent", !liveOf(image));
  panel.frame.setAttribute("aria-label", `${image.name}: ${panel.from.textContent}`);
  panel.ground.hidden ||= removing;
  panel.lines.hidden = !map || !removing;
  for (const part of [panel.heat, panel.scale, panel.scale.nextElementSibling]) part.hidden = !map || removing;
  if (map && removing) {
    drawRemoved(panel.lines, image, map.own, map.values, state.removed, width, height);
    panel.matters.querySelector("input").value = state.removed;
    panel.matters.querySelector("output").textContent = `${10 * state.removed} %`;
    drawCurves(panel.matters, map.own, state.removed);
  } else if (map) {
    drawHeat(panel.heat, map, image, tables[state.cmap], width, height);
    panel.heat.style.opacity = state.opacity;
    showScale(panel.scale, tables[state.cmap], map, state.opacity, state.background);
  }
  panel.hovered.hidden = true;
  panel.reading.textContent = map && patch && panel.query.hidden === false ? readingOf(map, patch) : map && !removing ? `${map.shape[0]} × ${map.shape[1]} patches; point at one for its value` : "";
}

// A class with its probability, or its score.
const withNumber = ({ label, probability, display }) => [label, probability === null ? display : percent(probability)].filter(Boolean).join(", ");

const placeOf = (patch) => `the patch in row ${patch[0]}, column ${patch[1]}`;

// What a side shows, in words.
function wordsOf(side) {
  const image = imageOf(side), patch = queryPatch(side), from = patch ? placeOf(patch) : `the model output (${image.pooling})`;
  const { map } = panels[side];
  if (state.map === "similarity") return side === state.query ? `Similarity to ${placeOf(patch)}` : `Similarity to ${placeOf(queryPatch(state.query))} of ${imageOf(state.query).name}`;
  const more = state.less && patch ? ", minus the map of the model output" : "";
  if (state.map === "rollout" && isLive()) return `Rollout from ${from} through layers ${state.end} to ${state.start}${more}`;
  if (state.map === "attention" && isLive()) return `Attention of ${from} in layer ${state.layer}${state.head === "" ? "" : `, head ${state.head}`}${more}`;
  if (state.map === MATTERS) return `${map.own.label}: ${removalOf(map.own, map.values, state.removed)}`;
  const facts = factsOf(map.own.facts);
  return `${titleOf(state.map)}${map.own.label ? ` for ${withNumber(map.own)}` : ""}, computed beforehand for the model output${facts ? ` · ${facts}` : ""}`;
}

// How the map of a side departs from the publication whose name it has, in words.
function departuresOf(side) {
  const image = imageOf(side), paper = methods[state.map].published, single = state.map === "attention" && state.head !== "";
  if (state.map === "similarity") return "";
  const phrases = isLive() ? [
    !single && state.head_fusion !== paper.head_fusion && `${state.head_fusion} over heads`,
    state.discard_ratio !== paper.discard_ratio && `${Math.round(100 * state.discard_ratio)}% discarded`,
    state.map === "rollout" && state.residual !== paper.residual && `residual ${state.residual}`,
    !single && state.value_weighted && "value-weighted",
  ] : [panels[side].map.own.departures];
  if (refines(image)) phrases.push(`refined${state.refine > 1 ? ` ${state.refine} times` : ""} by ${state.affinity === "both" ? "attention and keys" : state.affinity}`);
  const everyLayer = state.map !== "rollout" || (state.start === 1 && state.end === data.layers);
  const published = paper && everyLayer && JSON.stringify(paper) !== JSON.stringify(methods[state.map].defaults);
  return phrases.filter(Boolean).join(", ") || (published ? "paper" : "");
}

// The map layer by layer: how rollout builds up from the last layer downwards, or each layer's own attention.
async function showStrip() {
  const number = drawn, { map } = panels[state.query], image = imageOf(state.query), built = state.map === "rollout";
  $("strip").hidden = !map?.layers;
  if (!map?.layers) return;
  $("strip-title").textContent = built ? `How it builds up: from layer ${state.end} down to each layer` : "Attention of each layer";
  for (const [index, button] of [...$("layers").children].entries()) {
    const layer = index + 1, frame = button.firstChild, [width, height] = image.size;
    button.disabled = built && layer > state.end;
    button.setAttribute("aria-pressed", String(layer === (built ? state.start : state.layer)));
    frame.style.aspectRatio = `${width} / ${height}`;
    if (frame.firstChild.src !== image.image) frame.firstChild.src = image.image;
    layBackground(frame.children[1], image, state.opacity);
    frame.lastChild.hidden = button.disabled;
    if (button.disabled) continue;
    await new Promise((done) => setTimeout(done)); // a click need not wait for all of them
    if (number !== drawn) return;
    const own = { shape: map.shape, values: await map.layers(layer) }, scale = 120 / Math.max(width, height);
    if (number !== drawn) return;
    drawHeat(frame.lastChild, Object.assign(own, limitsOf(own.values, percentiles)), image, tables[state.cmap], Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale)));
    frame.lastChild.style.opacity = state.opacity;
  }
}

// --- controls --------------------------------------------------------------------------------------------------------

const outputs = {
  discard_ratio: (value) => `${Math.round(100 * value)} %`, residual: (value) => value.toFixed(2), opacity: (value) => `${Math.round(100 * value)} %`,
  refine: (value) => (value ? `${value} step${value > 1 ? "s" : ""}` : "no"),
};

// Which groups of controls belong to the map that is shown.
function groups() {
  const live = isLive() && state.map !== "similarity", kind = mapsOf(imageOf("a"), state.map)[0];
  return {
    images: images.length > 1, source: isLive(), class: !isLive() && Boolean(kind?.specific), layers: live && state.map === "rollout",
    layer: live && state.map === "attention", attention: live, residual: live && state.map === "rollout", refine: (live || !isLive()) && state.map !== MATTERS, drawing: state.map !== MATTERS,
  };
}

// Why a control does not apply just now, or null.
function whyNot(name) {
  const image = imageOf("a"), single = state.map === "attention" && state.head !== "";
  if (name === "head_fusion" && single) return "One head needs no fusion.";
  if (name === "value_weighted" && single) return "Single heads are kept as they are, not weighted.";
  if (name === "value_weighted" && image.refused.weighting) return image.refused.weighting;
  if (name === "value_weighted" && fusedSets.length < 2) return "The page had room for this one fusion only.";
  if (name === "head_fusion" && fusedSets.length < 2) return "The page had room for this one fusion only.";
  if (name === "head" && !image.heads) return "The page had no room for single heads.";
  if (name === "refine" || name === "affinity") {
    const kind = mapsOf(image, state.map)[0]?.refine_stage;
    if (!Object.keys(image.affinities).length) return image.refused.refine ?? image.refused.live;
    if (!isLive() && kind === "inside") return "Consensus refines the maps that it is made of.";
    if (!isLive() && !SPREAD.includes(kind)) return "This map is not refined.";
    if (image.uniform && name === "refine" && state.affinity === "attention") return null;
  }
  return null;
}

function showControls() {
  const shown = groups(), reasons = new Map();
  for (const group of $$("#controls fieldset")) group.hidden = !shown[group.dataset.for];
  fillClasses();
  for (const control of $$("#controls [data-name]")) {
    const { name } = control.dataset, why = whyNot(name), group = control.closest("fieldset");
    if (control.type === "checkbox") control.checked = state[name]; else control.value = state[name];
    control.disabled = Boolean(why);
    if (why) reasons.set(group, (reasons.get(group) ?? new Set()).add(why));
    const output = control.nextElementSibling;
    if (output) output.textContent = (outputs[name] ?? String)(state[name]);
  }
  for (const option of $$('[data-name="head_fusion"] option')) option.disabled = !fusedSets.includes(setName({ ...state, head_fusion: option.value }));
  for (const option of $$('[data-name="affinity"] option')) option.disabled = !(option.value === "both" ? ["attention", "keys"] : [option.value]).every((name) => imageOf("a").affinities[name]);
  for (const group of $$("#controls fieldset")) showReasons(group, reasons.get(group));
  const patch = queryPatch(state.query);
  $("source").textContent = patch ? `row ${patch[0]}, column ${patch[1]}` : "the model output";
  $("readout").hidden = !state[patchKey(state.query)] || state.map === "similarity";
  const refused = imageOf("a").refused.live;
  $("asking").hidden = Boolean(silence()); $("silent").textContent = silence() ?? "";
  $("refused").hidden = !refused; $("refused").textContent = refused ?? "";
  markTab($("maps"), state.map);
  showAbout();
}

// Beside controls that do not apply stands why.
function showReasons(group, reasons) {
  let line = group.querySelector(".why");
  if (!line) { line = document.createElement("p"); line.className = "why"; group.append(line); }
  line.hidden = !reasons;
  line.textContent = reasons ? [...reasons].join(" ") : "";
}

function showAbout() {
  const { grid, prefix, pooling } = imageOf("a"), words = grid ? [`${data.layers} layers`, `${grid[0]} × ${grid[1]} patches${prefix ? ` and ${prefix} prefix token${prefix > 1 ? "s" : ""}` : ""}`, `readout: ${pooling}`] : [];
  $("about").textContent = words.map((word) => ` · ${word}`).join("");
}

function fillClasses() {
  const select = document.querySelector('[data-name="class"]'), maps = mapsOf(imageOf("a"), state.map);
  select.replaceChildren(...maps.filter(({ specific }) => specific).map((map) => new Option(withNumber(map), map.label)));
  if (maps.length && !maps.some(({ label }) => label === state.class)) state.class = maps[0].label;
}

// --- what a reader does ----------------------------------------------------------------------------------------------

const numeric = new Set(["a", "b", "start", "end", "layer", "discard_ratio", "residual", "refine", "opacity", "removed"]);

// A value as it stands in a control or in the address, of its own kind; null where it is none.
function valueOf(name, text) {
  if (numeric.has(name)) return text !== "" && Number.isFinite(Number(text)) ? Number(text) : null;
  return typeof state[name] === "boolean" ? String(text) === "true" : String(text);
}

// Take over some values, as far as they are possible here.
function take(values) {
  for (const [name, text] of Object.entries(values)) {
    const value = name in state ? valueOf(name, text) : null;
    if (value !== null && isPossible(name, value)) state[name] = value;
  }
  if (state.start > state.end) { if ("end" in values) state.start = state.end; else state.end = state.start; }
  if (fusedSets.length && !fusedSets.includes(setName(state))) Object.assign(state, setOf(fusedSets[0]));
}

// Begin anew, with some values.
function begin(values) {
  from = null;
  Object.assign(state, initialOf(modes.includes(values.map) ? values.map : first));
  take(values);
  return update();
}

function isPossible(name, value) {
  const whole = (least, most) => Number.isInteger(value) && value >= least && value <= most;
  switch (name) {
    case "map": return modes.includes(value);
    case "a": return whole(0, images.length - 1);
    case "b": return whole(-1, images.length - 1);
    case "start": case "end": case "layer": return whole(1, data.layers);
    case "head": return value === "" || (/^\d+$/.test(value) && Number(value) >= 1 && Number(value) <= data.heads && images.every(({ heads }) => heads));
    case "patch": case "patchb": return /^(\d+,\d+)?$/.test(value);
    case "query": return sides.includes(value);
    case "discard_ratio": case "residual": return value >= 0 && value < 1;
    case "refine": return whole(0, 9);
    case "removed": return whole(0, 10);
    case "opacity": return value >= 0 && value <= 1;
    case "background": return Object.hasOwn(kept, value);
    case "cmap": return colourMaps.includes(value);
    case "head_fusion": return ["mean", "max", "min"].includes(value);
    case "affinity": return ["attention", "keys", "both"].includes(value);
    default: return true;
  }
}

// Draw once for all that a slider tells until the next frame.
let waiting = false;

function soon() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; update(); });
}

function ask(side, patch) {
  invited = false;
  state.query = side;
  state[patchKey(side)] = patch ? patch.join(",") : "";
  if (!patch && from) return choose(from);
  const { query } = panels[side];
  query.classList.remove("new"); query.getBoundingClientRect(); query.classList.add("new"); // the frame of the patch draws in anew
  return update();
}

// Let a map of the output give way to one of patches; whether there is one.
function askable(side) {
  const mode = liveOf(imageOf(side)), output = state.map;
  if (mode && mode !== output) { change(mode); from = output; }
  return Boolean(mode);
}

// Move the selected patch; from the whole output, start at the middle one.
function move(down, right) {
  if (state.map === MATTERS) { take({ removed: state.removed + right }); return update(); }
  if (!askable(state.query)) return say(state.query);
  const side = state.query, grid = gridOf(imageOf(side)), patch = queryPatch(side), inside = (value, count) => Math.min(Math.max(value, 0), count - 1);
  if (!grid) return say(side);
  ask(side, patch ? [inside(patch[0] + down, grid[0]), inside(patch[1] + right, grid[1])] : grid.map((count) => Math.floor(count / 2)));
}

// Say below the image why nothing can be selected.
function say(side) {
  const { message } = panels[side];
  message.textContent = refusal(imageOf(side)) ?? silence();
  message.hidden = false;
}

// Another map: options that were not touched become its own.
function choose(mode) {
  change(mode);
  return update();
}

function change(mode) {
  from = null;
  const before = initialOf(state.map), own = initialOf(mode);
  for (const name of Object.keys(own)) if (state[name] === before[name]) state[name] = own[name];
  take({ map: mode });
}

// Command line and Python call for the map of the side that was selected last.
function currentCall() {
  const side = state.query, image = imageOf(side), patch = queryPatch(side), { path } = image;
  const drawing = { ...(state.cmap === colourMaps[0] ? {} : { cmap: state.cmap }), ...(state.opacity === initialOf(state.map).opacity ? {} : { alpha: state.opacity }), ...(state.background === data.drawing.background ? {} : { background: state.background }) };
  const weighting = state.value_weighted ? "output" : false, refining = { refine: state.refine, ...(state.refine ? { affinity: state.affinity } : {}) };
  const query = patch ? { patch } : {}, both = (method, options) => ({ command: commandOf(path, call, method, options, drawing), python: explainCode(path, call, method, options, drawing) });
  if (state.map === "similarity") return both("similarity", { patch });
  const differing = (found, method, options) => (state.less && patch ? {
    command: `# the map of the patch; the difference is made in Python\n${found.command}`,
    python: differenceCode(path, call, method, options, found.python),
  } : found);
  if (state.map === MATTERS) return deletionCall(path, panels[side].map.own);
  if (!isLive()) {
    const { own } = panels[side].map, options = Object.fromEntries(Object.entries(own.options).filter(([, value]) => value !== null));
    return both(state.map, { ...(own.specific ? { class: own.class_index } : {}), ...options, ...(SPREAD.includes(own.refine_stage) && refines(image) ? refining : {}) });
  }
  const fused = { discard_ratio: state.discard_ratio, ...refining };
  if (state.map === "attention") {
    const single = state.head !== "";
    const options = { layer: state.layer, ...(single ? { head: Number(state.head) } : { head_fusion: state.head_fusion }), value_weighted: single ? false : weighting, ...fused };
    return differing(both("attention", { ...options, ...query }), "attention", options);
  }
  const options = { head_fusion: state.head_fusion, value_weighted: weighting, ...fused, residual: state.residual, start_layer: state.start, ...(state.end === data.layers ? {} : { end_layer: state.end }) };
  return differing(both("rollout", { ...options, ...query }), "rollout", options);
}

// The photograph with its map as a PNG, in the size that the page has it.
function saveImage() {
  const side = state.query, { photo, map } = panels[side], image = imageOf(side), canvas = document.createElement("canvas");
  const [width, height] = [photo.naturalWidth, photo.naturalHeight], layer = document.createElement("canvas");
  canvas.width = width; canvas.height = height;
  const pen = canvas.getContext("2d");
  pen.drawImage(photo, 0, 0);
  if (map && state.map === MATTERS) {
    drawRemoved(layer, image, map.own, map.values, state.removed, width, height);
    pen.drawImage(layer, 0, 0);
  } else if (map) {
    paintBackground(pen, image, width, height);
    drawHeat(layer, map, image, tables[state.cmap], width, height);
    pen.globalAlpha = state.opacity; pen.drawImage(layer, 0, 0); pen.globalAlpha = 1;
  }
  const link = document.createElement("a"), stem = image.name.split(/[\\/]/).pop().replace(/\.\w+$/, "").replace(/[^\p{L}\p{N} ._-]/gu, "_");
  link.download = `${stem || "photograph"}-${state.map}.png`;
  link.href = canvas.toDataURL("image/png");
  link.click();
}

// What the background makes of the part that the model saw.
function paintBackground(pen, { size, window: [left, top, right, bottom] }, width, height) {
  const [x0, x1] = [left, right].map((x) => Math.min(Math.max(Math.round((x * width) / size[0]), 0), width));
  const [y0, y1] = [top, bottom].map((y) => Math.min(Math.max(Math.round((y * height) / size[1]), 0), height));
  if (x1 === x0 || y1 === y0) return;
  const image = pen.getImageData(x0, y0, x1 - x0, y1 - y0), pixels = image.data, matrix = backgroundMatrix(state.background), strength = strengthOf(state.opacity);
  for (let k = 0; k < pixels.length; k += 4) {
    const own = [pixels[k], pixels[k + 1], pixels[k + 2]];
    matrix.forEach((row, c) => { pixels[k + c] = (1 - strength) * own[c] + strength * (row[0] * own[0] + row[1] * own[1] + row[2] * own[2]); });
  }
  pen.putImageData(image, x0, y0);
}

async function copy(id) {
  const text = $(id).textContent;
  try { await navigator.clipboard.writeText(text); } catch {
    getSelection().selectAllChildren($(id)); // where there is no clipboard, it is marked for the reader
    document.execCommand("copy");
  }
  $("copied").textContent = "copied";
}

// --- the page --------------------------------------------------------------------------------------------------------

function makeTabs() {
  const asks = (mode) => LIVE.includes(mode) && (mode === "similarity" ? hasFeatures : computes);
  for (const [words, own] of [["Of a patch:", modes.filter(asks)], ["Of the model output:", modes.filter((mode) => !asks(mode) && mode !== MATTERS)], ["", matters ? [MATTERS] : []]]) {
    if (!own.length) continue;
    const group = document.createElement("div"), label = document.createElement("span");
    Object.assign(group, { className: "group", role: "presentation" }); Object.assign(label, { className: "which", textContent: words });
    label.setAttribute("aria-hidden", "true");
    group.append(label, ...own.map((mode) => {
      const tab = document.createElement("button");
      Object.assign(tab, { type: "button", textContent: titleOf(mode), title: asks(mode) ? "Click a patch of the photograph to see its map" : mode === MATTERS ? "Remove the highest patches of the map, and see whether the score falls" : "Computed for the model output; a click on a patch shows its own map" });
      tab.setAttribute("role", "tab"); tab.dataset.name = mode;
      return tab;
    }));
    $("maps").append(group);
  }
}

function makeLayers() {
  $("layers").append(...Array.from({ length: data.layers }, (_, index) => {
    const button = document.createElement("button"), frame = document.createElement("span"), photo = document.createElement("img");
    button.type = "button"; frame.className = "frame"; photo.alt = "";
    frame.append(photo, Object.assign(document.createElement("img"), { className: "ground", alt: "" }), document.createElement("canvas"));
    button.append(frame, String(index + 1));
    button.setAttribute("aria-label", `Layer ${index + 1}`);
    button.addEventListener("click", () => { take({ [state.map === "rollout" ? "start" : "layer"]: index + 1 }); update(); });
    return button;
  }));
}

function fillControls() {
  const fill = (name, options) => document.querySelector(`[data-name="${name}"]`).replaceChildren(...options.map(([text, value]) => new Option(text, value)));
  const names = images.map(({ name }, index) => [name, index]);
  fill("a", names); fill("b", [["nothing", -1], ...names]);
  fill("head", [["all, fused", ""], ...Array.from({ length: data.heads }, (_, head) => [`head ${head + 1}`, head + 1])]);
  fill("cmap", colourMaps.map((name) => [name, name])); fill("background", Object.keys(kept).map((name) => [{ photo: "the photograph", grey: "in grey", dim: "dimmed" }[name] ?? name, name]));
  for (const name of ["start", "end", "layer"]) document.querySelector(`[data-name="${name}"]`).max = data.layers;
}

function makePanel(side) {
  const box = $(`panel-${side}`), part = (selector) => box.querySelector(selector);
  const panel = panels[side] = {
    stage: part(".stage"), frame: part(".frame"), photo: part("img"), ground: part(".ground"), heat: part(".heat"), lines: part(".lines"), seen: part(".seen"), hovered: part(".hovered"), message: part(".message"),
    query: part(".query"), comparison: part(".comparison"), correlation: part(".correlation"), less: part(".less"), name: part("h2"), answers: part(".answers"), from: part(".from"), departs: part(".departs"), reading: part(".reading"), scale: part(".scale"), matters: part(".matters"), map: null,
  };
  const at = (event) => panel.map && patchAt(event, panel.frame, imageOf(side), panel.map.shape);
  const read = (patch) => {
    outline(panel.hovered, imageOf(side), panel.map?.shape ?? [1, 1], patch);
    panel.reading.textContent = patch ? readingOf(panel.map, patch) : panel.map ? "the model did not see this part" : "";
  };
  panel.frame.addEventListener("click", (event) => {
    const image = imageOf(side);
    let patch = at(event);
    if (patch && askable(side)) {
      patch = patchAt(event, panel.frame, image, gridOf(image));
      if (patch) return ask(side, patch);
    }
    read(patch); // a finger points at nothing before it taps
    if (patch || !panel.map) say(side);
  });
  panel.frame.addEventListener("pointermove", (event) => read(at(event)));
  panel.frame.addEventListener("pointerleave", () => { if (panel.map) showPanel(side, null); });
  panel.less.addEventListener("click", () => { state.less = !state.less; update(); });
  panel.frame.addEventListener("focus", () => { state.query = side; });
}

const arrows = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function listen() {
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  $("controls").addEventListener("input", ({ target }) => { take({ [target.dataset.name]: target.type === "checkbox" ? target.checked : target.value }); soon(); });
  $("panels").addEventListener("input", ({ target }) => { take({ removed: target.value }); soon(); });
  $("readout").addEventListener("click", () => ask(state.query, null));
  $("reset").addEventListener("click", () => begin({}));
  $("save").addEventListener("click", saveImage);
  $("call").addEventListener("click", () => {
    const { command, python } = currentCall();
    $("command").textContent = command; $("python").textContent = python; $("copied").textContent = "";
    $("calls").showModal();
  });
  $("close").addEventListener("click", () => $("calls").close());
  for (const button of $$("[data-copy]")) button.addEventListener("click", () => copy(button.dataset.copy));
  wireTabs($("maps"), choose);
  addEventListener("keydown", (event) => {
    if (isField(event.target) || !isBare(event) || $("calls").open) return;
    if (event.key === "Escape" && (isLive() || from)) ask(state.query, null);
    else if (arrows[event.key]) { event.preventDefault(); move(...arrows[event.key]); }
  });
  addEventListener("resize", () => update());
  addEventListener("hashchange", () => begin(readAddress()));
}

makeTabs(); makeLayers(); fillControls(); sides.forEach(makePanel); listen();
begin(readAddress());
