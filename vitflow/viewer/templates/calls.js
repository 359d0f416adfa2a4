// The command and the lines of Python that make the map which is shown.

const shellWord = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);
const pythonValue = (value) => ({ string: JSON.stringify(value), boolean: value ? "True" : "False" }[typeof value]
  ?? (value === null ? "None" : Array.isArray(value) ? `(${value.map(pythonValue).join(", ")})` : String(value)));

// `vitflow explain` of one image.
function commandOf(path, call, method, options, drawing) {
  if (call.arguments === null) return "# no command line names this model: it was handed over in Python";
  if (path === null) return "# no command line names this image: it was handed over in Python";
  const words = ["vitflow", "explain", path.startsWith("-") ? `./${path}` : path, ...call.arguments, "--method", method];
  for (const [name, value] of Object.entries({ ...options, ...drawing })) {
    const flag = `--${name.replaceAll("_", "-")}`;
    if (name === "class") words.push("--class", String(value));
    else if (name === "value_weighted") words.push(flag, { true: "on", false: "off" }[value] ?? value);
    else if (value === true) words.push(flag);
    else if (value !== null) words.push(flag, Array.isArray(value) ? value.join(",") : String(value));
  }
  return words.map(shellWord).join(" ");
}

// The same by an explainer.
function explainCode(path, call, method, options, drawing) {
  const { class: target, ...own } = options, named = (values) => Object.entries(values).map(([name, value]) => `${name}=${pythonValue(value)}`);
  const given = [path === null ? "image" : pythonValue(path), `method="${method}"`, ...(target === undefined ? [] : [`target=${pythonValue(target)}`]), ...named(own)];
  return [...explainerCode(call), `saliency = explainer.explain(${given.join(", ")})`, `saliency.save(${['"map.png"', ...named(drawing)].join(", ")})`].join("\n");
}

// That of a patch minus that of the model output, each as shares of its sum.
function differenceCode(path, call, method, options, code) {
  const whole = explainCode(path, call, method, options, {}).split("\n").at(-2).replace("saliency =", "whole =");
  return [...code.split("\n").slice(0, -1), whole, "difference = saliency.grid / saliency.grid.sum() - whole.grid / whole.grid.sum()"].join("\n");
}

const explainerCode = (call) => ["import vitflow", "", ...(call.python === "explainer" ? [] : [`explainer = ${call.python}`])];
