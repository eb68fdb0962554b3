// Matrix products, norms, activations and softmax on typed arrays. Sums are in float64, arrays in float32.

// x W + b, for all rows of x. W is stored as [outputs × inputs]: a dot product reads both operands in order.
export function product(x, linear) {
  const { kernel, bias, outputs } = linear;
  const y = kernel ? kernel.product(x, linear) : productInJavaScript(x, linear);
  if (bias) for (let at = 0; at < y.length; at += outputs) for (let o = 0; o < outputs; o++) y[at + o] += bias[o];
  return y;
}

// Without WebAssembly. Sums are in float64.
function productInJavaScript(x, { weights, inputs, outputs }) {
  const y = new Float32Array((x.length / inputs) * outputs);
  for (let n = 0; n < y.length; n++)
    y[n] = dot(x, Math.floor(n / outputs) * inputs, weights, (n % outputs) * inputs, inputs);
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
export const ACTIVATIONS = {
  gelu,
  gelu_exact: exactGelu,
  relu: (x) => Math.max(x, 0),
  relu2: (x) => Math.max(x, 0) ** 2,
  swiglu: silu,
  geglu: gelu,
};

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
