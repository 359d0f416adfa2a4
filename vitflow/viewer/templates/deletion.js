// "Does it matter?": patches are removed in the order of a map, while the score of its class is read beside two baselines.
const MATTERS = "matters";
const CURVES = { map: "the highest patches of the map", random: "random patches, mean of 3 orders", centre: "patches nearest the centre" };

const stepsOf = ({ steps }) => Float64Array.from(steps, (digit) => parseInt(digit, 16));
const countRemoved = (steps, removed) => steps.filter((step) => step <= removed).length;
const scoreOf = (entry, value) => (entry.probability === null ? short(value) : percent(value));

// What is shown, in words.
function removalOf(entry, steps, removed) {
  const count = countRemoved(steps, removed), how = entry.replace === "drop" ? "their tokens are dropped" : "the mean colour is in their place";
  return `${count} of ${steps.length} patches (${10 * removed} %) are removed${count ? `: ${how}` : ""}`;
}

// Cover the removed patches on a canvas of width × height.
function drawRemoved(canvas, image, { shape: [rows, cols] }, steps, removed, width, height) {
  canvas.width = width; canvas.height = height;
  const pen = canvas.getContext("2d"), { size, window: seen } = image, [left, top, right, bottom] = areaOf(image, [rows, cols]);
  pen.scale(width / size[0], height / size[1]);
  pen.beginPath(); pen.rect(seen[0], seen[1], seen[2] - seen[0], seen[3] - seen[1]); pen.clip();
  pen.fillStyle = getComputedStyle(document.body).getPropertyValue("--frame");
  const wide = (right - left) / cols, high = (bottom - top) / rows, overlap = 0.5 * (size[0] / width); // no seams
  steps.forEach((step, at) => {
    if (step <= removed) pen.fillRect(left + (at % cols) * wide - overlap, top + Math.floor(at / cols) * high - overlap, wide + 2 * overlap, high + 2 * overlap);
  });
}

function svg(name, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}

// The three curves with a mark at the step that is shown, and a legend with the scores there.
function drawCurves(box, entry, removed) {
  const chart = box.querySelector(".chart"), width = Math.max(box.clientWidth, 200), height = 190, [left, right, top, bottom] = [46, 12, 10, 26];
  const every = Object.values(entry.scores).flat(), shares = entry.probability !== null;
  const low = shares ? 0 : Math.min(...every), high = shares ? 1 : Math.max(...every) + (Math.max(...every) === low ? 1 : 0), last = entry.scores.map.length - 1;
  const x = (step) => left + (step / last) * (width - left - right), y = (value) => height - bottom - ((value - low) / (high - low)) * (height - top - bottom);
  chart.setAttribute("viewBox", `0 0 ${width} ${height}`); chart.setAttribute("height", height);
  const grid = [low, (low + high) / 2, high].flatMap((value) => [
    svg("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), class: "rule" }), svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, shares ? `${100 * value} %` : short(value)),
  ]);
  const ticks = [0, last / 2, last].map((step) => svg("text", { x: x(step), y: height - 6, "text-anchor": { 0: "start", [last]: "end" }[step] ?? "middle" }, step ? `${(100 * step) / last} %` : "0 % removed"));
  const lines = Object.entries(entry.scores).reverse().flatMap(([name, values]) => [
    svg("polyline", { class: `curve ${name}`, points: values.map((value, step) => `${x(step)},${y(value)}`).join(" ") }), svg("circle", { class: `mark ${name}`, cx: x(removed), cy: y(values[removed]), r: name === "map" ? 5 : 3.5 }),
  ]);
  chart.replaceChildren(...grid, ...ticks, svg("line", { x1: x(removed), x2: x(removed), y1: top, y2: height - bottom, class: "rule" }), ...lines);
  chart.setAttribute("aria-label", `${entry.label}: ${scoreOf(entry, entry.scores.map[removed])} without ${CURVES.map}`);
  box.querySelector(".curves").replaceChildren(...Object.entries(CURVES).map(([name, words]) => {
    const row = document.createElement("li");
    row.className = name;
    row.append(Object.assign(document.createElement("strong"), { textContent: scoreOf(entry, entry.scores[name][removed]) }), ` without ${words}`);
    return row;
  }));
}

// The class and method of the curves, as Python: the command line draws the map, whose order it is.
function deletionCall(path, entry) {
  const map = { class: entry.class_index, ...Object.fromEntries(Object.entries(entry.options).filter(([, value]) => value !== null)) };
  const code = explainCode(path, call, entry.method, map, {}).split("\n").slice(0, -1);
  return {
    command: `# the map; its curve is made in Python\n${commandOf(path, call, entry.method, map, {})}`,
    python: [...code, `[curves] = vitflow.evaluation.faithfulness_curves(explainer, [saliency], replace="${entry.replace}")`, "print(curves.fractions, curves.deletion)"].join("\n"),
  };
}
