// The command and the lines of Python that make the map which is shown.

const shellWord = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);
const pythonValue = (value) => ({ string: JSON.stringify(value), boolean: value ? "True" : "False" }[typeof value]
  ?? (value === null ? "None" : Array.isArray(value) ? `(${value.map(pythonValue).join(", ")})` : String(value)));

// `vitflow explain` of one picture.
function commandOf(path, call, method, options, drawing) {
  if (call.arguments === null) return "# no command line names this model: it was handed over in Python";
  if (path === null) return "# no command line names this picture: it was handed over in Python";
  const words = ["vitflow", "explain", path.startsWith("-") ? `./${path}` : path, ...call.arguments, "--method", method];
  for (const [name, value] of Object.entries({ ...options, ...drawing })) {
    const flag = `--${name.replaceAll("_", "-")}`;
    if (name === "class") words.push("--class", String(value));
    else if (name === "value_weighted") { if (!value) words.push(`--no-${flag.slice(2)}`); } // it is on unless told otherwise
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

const explainerCode = (call) => ["import vitflow", "", ...(call.python === "explainer" ? [] : [`explainer = ${call.python}`])];

const recordCode = (path, call, recording) => [
  "import torch", ...explainerCode(call),
  `with vitflow.record_attention(explainer.model, ${recording}) as trace, torch.no_grad():`,
  `    explainer.forward(explainer.pixels(${path === null ? "image" : pythonValue(path)}))`,
];

// A rollout that ends below the last layer, which no option of `explain` asks for.
function rolloutCode(path, call, options, patch, end) {
  const { head_fusion, value_weighted, refine, affinity, ...own } = options;
  const weighting = pythonValue(value_weighted), fusion = `("${head_fusion}", ${weighting})`;
  const named = Object.entries(own).map(([name, value]) => `${name}=${pythonValue(value)}`).join(", ");
  const lines = recordCode(path, call, `fusions=[${fusion}, ("mean", False)], keys=True`);
  lines.push(patch ? `readout = torch.eye(trace.layout.num_tokens)[trace.layout.token_of_patch(${patch.join(", ")})]` : "readout = trace.readout");
  lines.push(`layers = trace.fused("${head_fusion}", value_weighted=${weighting})[:${end}]`);
  lines.push(`tokens = vitflow.attention_rollout(layers, readout=readout, num_prefix_tokens=trace.layout.num_prefix_tokens, ${named})`);
  lines.push("grid = trace.layout.to_grid(tokens)");
  if (refine) {
    lines.push("", "from vitflow.explaining.making.refining import affinity_of", "from vitflow.methods.refinement import refine", "");
    lines.push(`grid = refine(grid, affinity_of(trace, "${affinity}", grid.shape[1:]), ${refine})`);
  }
  return lines.join("\n");
}

// The likeness of features to those of one patch.
function likenessCode(path, call, patch, other) {
  const read = (own, name) => [...recordCode(own, call, "attention=False, features=[path]").slice(-2), `${name} = torch.nn.functional.normalize(patches(trace, path), dim=-1)`];
  return [
    "import torch", ...explainerCode(call), "from vitflow.models.anatomy import block_norm", "", "path = block_norm(explainer.model, -1)", "",
    "def patches(trace, path):", "    layout, channels_last = trace.feature_layouts[path]", "    features = trace.features[path][0]",
    "    if features.ndim == 3:", "        features = features.flatten(0, 1) if channels_last else features.flatten(1).T",
    "    return features[layout.num_prefix_tokens:].unflatten(0, (layout.rows, layout.cols))", "",
    ...read(path, "asked"), ...(other === undefined ? ["shown = asked"] : read(other, "shown")), `grid = shown @ asked[${patch.join(", ")}]`,
  ].join("\n");
}
