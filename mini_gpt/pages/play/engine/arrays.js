// Matrix products, norms, activations and softmax on typed arrays. Sums are in float64, arrays in float32.

// x W + b, for all rows of x. W is stored as [outputs × inputs]: a dot product reads both operands in order.
export function product(x, linear) {
  const { kernel, bias, outputs } = linear;
  const y = kernel ? kernel.product(x, linear) : productInJavaScript(x, linear);
  if (bias) for (let at = 0; at < y.length; at += outputs) for (let o = 0; o < outputs; o++) y[at + o] += bias[o];
  return y;
}

// Two rows and four outputs at a time: each number that is read takes part in two or four products. At the edges, the
// last row or output is computed several times.
function productInJavaScript(x, { weights, inputs, outputs }) {
  const rows = x.length / inputs;
  const y = new Float32Array(rows * outputs);
  for (let o = 0; o < outputs; o += 4) {
    const o1 = Math.min(o + 1, outputs - 1);
    const o2 = Math.min(o + 2, outputs - 1);
    const o3 = Math.min(o + 3, outputs - 1);
    const w0 = o * inputs;
    const w1 = o1 * inputs;
    const w2 = o2 * inputs;
    const w3 = o3 * inputs;
    for (let r = 0; r < rows; r += 2) {
      const s = Math.min(r + 1, rows - 1);
      const xr = r * inputs;
      const xs = s * inputs;
      const yr = r * outputs;
      const ys = s * outputs;
      let r0 = 0;
      let r1 = 0;
      let r2 = 0;
      let r3 = 0;
      let s0 = 0;
      let s1 = 0;
      let s2 = 0;
      let s3 = 0;
      for (let k = 0; k < inputs; k++) {
        const a = x[xr + k];
        const b = x[xs + k];
        const c0 = weights[w0 + k];
        const c1 = weights[w1 + k];
        const c2 = weights[w2 + k];
        const c3 = weights[w3 + k];
        r0 += a * c0;
        r1 += a * c1;
        r2 += a * c2;
        r3 += a * c3;
        s0 += b * c0;
        s1 += b * c1;
        s2 += b * c2;
        s3 += b * c3;
      }
      y[yr + o] = r0;
      y[yr + o1] = r1;
      y[yr + o2] = r2;
      y[yr + o3] = r3;
      y[ys + o] = s0;
      y[ys + o1] = s1;
      y[ys + o2] = s2;
      y[ys + o3] = s3;
    }
  }
  return y;
}

export function dot(x, from, y, at, width) {
  let sum = 0;
  for (let k = 0; k < width; k++) sum += x[from + k] * y[at + k];
  return sum;
}

// Each row of x, divided by its root mean square (rmsnorm), or by its standard deviation after its mean is subtracted
// (layernorm). scale, bias: of each entry, or null.
export function norm(x, { kind, epsilon, scale, bias, width }, y = new Float32Array(x.length)) {
  for (let from = 0; from < x.length; from += width) {
    let mean = 0;
    let square = 0;
    if (kind === "layernorm") for (let k = 0; k < width; k++) mean += x[from + k] / width;
    for (let k = 0; k < width; k++) square += (x[from + k] - mean) ** 2 / width;
    const factor = 1 / Math.sqrt(square + epsilon);
    for (let k = 0; k < width; k++)
      y[from + k] = (x[from + k] - mean) * factor * (scale ? scale[k] : 1) + (bias ? bias[k] : 0);
  }
  return y;
}

export const sigmoid = (x) => 1 / (1 + Math.exp(-x));
export const logSigmoid = (x) => Math.min(x, 0) - Math.log1p(Math.exp(-Math.abs(x)));
export const softplus = (x) => Math.max(x, 0) + Math.log1p(Math.exp(-Math.abs(x)));
const silu = (x) => x * sigmoid(x);
const gelu = (x) => x * sigmoid(2 * Math.sqrt(2 / Math.PI) * (x + 0.044715 * x * x * x)); // (1 + tanh u) / 2 = σ(2u)
const exactGelu = (x) => 0.5 * x * (1 + erf(x / Math.SQRT2));

// 2/√π · e^(-x²) · Σ 2ⁿ x²ⁿ⁺¹ / (1 · 3 ⋯ (2n+1)): all terms have the same sign, so no digits cancel.
function erf(x) {
  if (Math.abs(x) > 6) return Math.sign(x);
  let sum = 0;
  for (let n = 0, term = x; Math.abs(term) > 1e-17 * Math.abs(sum); n++, term *= (2 * x * x) / (2 * n + 1)) sum += term;
  return (2 / Math.sqrt(Math.PI)) * Math.exp(-x * x) * sum;
}

// {model.activation: the activation of `up`, or of the gate that multiplies it}
export const ACTIVATIONS = { gelu, gelu_exact: exactGelu, relu: (x) => Math.max(x, 0), swiglu: silu, geglu: gelu };

// e^logit / Σ e^logit, in place, over the entries from `first` to `last`. sink: one more logit in the sum, or null.
export function softmax(logits, first, last, sink = null) {
  let most = sink ?? -Infinity;
  let sum = 0;
  for (let j = first; j <= last; j++) most = Math.max(most, logits[j]);
  for (let j = first; j <= last; j++) sum += logits[j] = Math.exp(logits[j] - most);
  if (sink !== null) sum += Math.exp(sink - most);
  for (let j = first; j <= last; j++) logits[j] /= sum;
}

// ln Σ e^logit
export function logSumExp(logits) {
  let most = -Infinity;
  let sum = 0;
  for (const logit of logits) most = Math.max(most, logit);
  for (const logit of logits) sum += Math.exp(logit - most);
  return most + Math.log(sum);
}

// The array, or a longer one with the same first entries if it has less than `length`.
export function grown(array, length) {
  if (array.length >= length) return array;
  const longer = new array.constructor(Math.max(length, 2 * array.length));
  longer.set(array);
  return longer;
}
