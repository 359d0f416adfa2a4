// The mathematics of rollout, as vitflow's own: one row carried down through the layers.

// --- unpacking -------------------------------------------------------------------------------------------------------

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// All numbers of half precision by their 16 bits.
function halves() {
  const table = new Float32Array(65536);
  for (let bits = 0; bits < 65536; bits++) {
    const exponent = (bits >> 10) & 31, fraction = bits & 1023, sign = bits >> 15 ? -1 : 1;
    table[bits] = sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : (2 ** -14 * fraction) / 1024);
  }
  return table;
}

let halfTable = null;

function fromHalves(bytes) {
  halfTable ??= halves();
  const count = bytes.length / 2, values = new Float32Array(count);
  for (let k = 0; k < count; k++) values[k] = halfTable[(bytes[k] << 8) | bytes[count + k]];
  return values;
}

// The numbers of something packed, unpacked when they are first asked for.
function unpack(packed) {
  packed.values ??= inflate(packed.data).then(fromHalves);
  return packed.values;
}

// --- discarding ------------------------------------------------------------------------------------------------------

// The count-th smallest of the entries whose key is a patch, and how many of its equals go: found by its bits, the upper
// half of them first. Numbers of at least 0 have the order of their bits.
function smallest(bits, tokens, prefix, count) {
  const search = (shift, upper, rank) => {
    const counts = new Uint32Array(65536);
    for (let row = 0, k = 0; row < tokens; row++) {
      k += prefix;
      for (const end = (row + 1) * tokens; k < end; k++) {
        if (upper === null) counts[bits[k] >>> 16]++;
        else if (bits[k] >>> 16 === upper) counts[bits[k] & 65535]++;
      }
    }
    let bin = 0;
    while (rank > counts[bin]) rank -= counts[bin++];
    return [bin, rank];
  };
  const [upper, rank] = search(16, null, count), [lower, equals] = search(0, upper, rank);
  return { limit: ((upper << 16) | lower) >>> 0, equals };
}

// One layer without its smallest entries: exactly ⌊ratio · N · n⌋ of those whose key is a patch, ties by position.
// Kept is what is above `cut` in each row; in the row `tie`, up to the column `until`, what is above `limit`.
function discardLow(values, tokens, prefix, ratio) {
  const count = Math.floor(ratio * tokens * (tokens - prefix));
  const layer = { values, tokens, prefix, tie: tokens, until: 0, limit: -1, below: -1, sums: new Float64Array(tokens) };
  if (count) {
    const bits = new Uint32Array(values.buffer, values.byteOffset, values.length);
    const { limit, equals } = smallest(bits, tokens, prefix, count);
    // The numbers themselves, as JavaScript compares them: the limit, and the next one below it.
    [layer.limit, layer.below] = new Float32Array(Uint32Array.of(limit, Math.max(limit - 1, 0)).buffer);
    let left = equals;
    for (let row = 0; row < tokens && left; row++) {
      for (let column = prefix; column < tokens && left; column++) {
        if (bits[row * tokens + column] === limit && --left === 0) { layer.tie = row; layer.until = column + 1; }
      }
    }
  }
  for (let row = 0; row < tokens; row++) {
    let total = 0;
    eachPart(layer, row, (from, to, cut) => { for (let k = from; k < to; k++) if (values[k] > cut) total += values[k]; });
    layer.sums[row] = total;
  }
  return layer;
}

// The parts of a row with one cut each: prefix tokens are never discarded.
function eachPart({ tokens, prefix, tie, until, limit, below }, row, visit) {
  const start = row * tokens, end = start + tokens;
  visit(start, start + prefix, -1);
  if (row === tie) { visit(start + prefix, start + until, limit); visit(start + until, end, below); }
  else visit(start + prefix, end, row < tie ? limit : below);
}

// --- rollout ---------------------------------------------------------------------------------------------------------

// Add a row of the layer times a factor.
function addRow(layer, row, factor, out) {
  const { values } = layer, start = row * layer.tokens;
  eachPart(layer, row, (from, to, cut) => {
    for (let k = from; k < to; k++) { const value = values[k]; if (value > cut) out[k - start] += factor * value; }
  });
}

// The row times Â = rownorm(α I + (1 − α) W); where nothing is left of a row of W, the row of the identity.
function carry(row, layer, residual) {
  const out = new Float64Array(layer.tokens);
  for (let token = 0; token < layer.tokens; token++) {
    const weight = row[token], total = layer.sums[token];
    if (weight === 0) continue;
    if (!(total > 0)) { out[token] += weight; continue; }
    const whole = residual + (1 - residual) * total;
    addRow(layer, token, (weight * (1 - residual)) / whole, out);
    out[token] += (weight * residual) / whole;
  }
  return out;
}

// The row qᵀ Â_end ⋯ Â_start, and what it was after each layer, by number from 1.
function rollout(layers, readout, { start, end, residual }) {
  const steps = new Map();
  let row = readout;
  for (let number = end; number >= start; number--) steps.set(number, row = carry(row, layers[number - 1], residual));
  return { row, steps };
}

// The row qᵀ W of one layer.
function rawAttention(layer, readout) {
  const out = new Float64Array(layer.tokens);
  readout.forEach((weight, token) => { if (weight !== 0) addRow(layer, token, weight, out); });
  return out;
}

// --- refinement ------------------------------------------------------------------------------------------------------

// A symmetric matrix from its upper triangle with the diagonal, row by row.
function symmetric(triangle, size) {
  const matrix = new Float32Array(size * size);
  for (let row = 0, k = 0; row < size; row++) {
    for (let column = row; column < size; column++, k++) matrix[row * size + column] = matrix[column * size + row] = triangle[k];
  }
  return matrix;
}

// Sinkhorn–Knopp: factors that make rows and columns sum to 1, until every row does within 1e-9, at most 100 rounds; and
// half of what each row lacks then.
function balance(matrix, size) {
  let rows = new Float64Array(size).fill(1);
  const cols = new Float64Array(size).fill(1), rest = new Float64Array(size);
  for (let round = 0; ; round++) {
    const scaled = new Float64Array(size), sums = new Float64Array(size);
    let worst = 0;
    for (let i = 0; i < size; i++) {
      let total = 0;
      for (let j = 0, k = i * size; j < size; j++, k++) total += matrix[k] * cols[j];
      rest[i] = (1 - rows[i] * total) / 2;
      worst = Math.max(worst, Math.abs(rows[i] * total - 1));
      scaled[i] = 1 / total;
      for (let j = 0, k = i * size; j < size; j++, k++) sums[j] += scaled[i] * matrix[k];
    }
    if (round === 100 || (round && worst <= 1e-9)) return { matrix, size, rows, cols, rest };
    rows = scaled;
    for (let j = 0; j < size; j++) cols[j] = 1 / sums[j];
  }
}

// (P + Pᵀ)/2 times a map, P being the balanced matrix; what its rows lack counts on the diagonal.
function spreadAlike({ matrix, size, rows, cols, rest }, map) {
  const out = new Float64Array(size), back = new Float64Array(size), scaled = cols.map((factor, j) => factor * map[j]);
  for (let i = 0; i < size; i++) {
    let total = 0;
    const weight = rows[i] * map[i];
    for (let j = 0, k = i * size; j < size; j++, k++) {
      total += matrix[k] * scaled[j];
      back[j] += weight * matrix[k];
    }
    out[i] = rows[i] * total;
  }
  return out.map((value, j) => (value + cols[j] * back[j]) / 2 + rest[j] * map[j]);
}

// A map refined: so many steps among the patches that one of the affinities, or their mean, calls alike.
function refine(map, affinities, steps) {
  for (let step = 0; step < steps; step++) {
    const parts = affinities.map((affinity) => spreadAlike(affinity, map));
    map = parts[0].map((_, j) => parts.reduce((sum, part) => sum + part[j], 0) / parts.length);
  }
  return map;
}

// --- likeness --------------------------------------------------------------------------------------------------------

// The cosine of each of some vectors [count, width] to one vector.
function cosines(vectors, width, one) {
  const length = Math.hypot(...one), out = new Float64Array(vectors.length / width);
  for (let k = 0; k < out.length; k++) {
    let dot = 0, square = 0;
    for (let j = 0, at = k * width; j < width; j++, at++) { dot += vectors[at] * one[j]; square += vectors[at] ** 2; }
    out[k] = square && length ? dot / Math.sqrt(square) / length : 0;
  }
  return out;
}

// --- limits of the colours -------------------------------------------------------------------------------------------

// A percentile, linear between the values.
function percentile(values, share) {
  const sorted = Float64Array.from(values).sort(), at = (share / 100) * (sorted.length - 1), low = Math.floor(at);
  return sorted[low] + (at - low) * (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]);
}

// Between which values the colours are spread, as vitflow's overlays spread them.
// How alike two maps are: Pearson's correlation of their patches; 0 where one of them is constant.
function correlation(first, second) {
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length, means = [mean(first), mean(second)];
  let both = 0, own = 0, theirs = 0;
  for (let k = 0; k < first.length; k++) {
    const [a, b] = [first[k] - means[0], second[k] - means[1]];
    both += a * b; own += a * a; theirs += b * b;
  }
  return own && theirs ? both / Math.sqrt(own * theirs) : 0;
}

// One map less another, each as shares of its sum.
function less(first, second) {
  const shares = (values) => { const sum = values.reduce((all, value) => all + value, 0); return values.map((value) => (sum ? value / sum : 0)); };
  const [own, theirs] = [first, second].map((values) => shares(Float64Array.from(values)));
  return own.map((value, k) => value - theirs[k]);
}

function limitsOf(values, [lower, upper], signed = true) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  const largest = Math.max(Math.abs(low), Math.abs(high));
  if (high - low <= 1e-6 * largest) return { low, high: low };
  if (low < -1e-6 * largest && (signed || high <= 0)) {
    const limit = percentile(values.map(Math.abs), upper) || largest;
    return { low: -limit, high: limit };
  }
  const robust = [percentile(values, lower), percentile(values, upper)];
  if (robust[1] > Math.max(robust[0], 0)) [low, high] = robust;
  return { low: Math.max(low, 0), high };
}
