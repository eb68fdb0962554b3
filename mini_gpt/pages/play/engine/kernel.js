// Matrix products of a model in WebAssembly, with four numbers at a time: about ten times as fast as in JavaScript.
// Sums are in float32. kernel.wat is the source of the binary; tests/pages/test_play_kernel.py compares them.

import { bytesOf } from "../../common/arrays.js";

// base64
const BINARY =
  "AGFzbQEAAAABEwJgBHt7e3sBe2AHf39/f39/fwACEAEEcGFnZQZtZW1vcnkCAAEDAwIAAQcLAQdwcm9kdWN0AAEKvgQClQEBAnsgACAB/Q0AAQID" +
  "EBESEwQFBgcUFRYXIAAgAf0NCAkKCxgZGhsMDQ4PHB0eH/3kASEEIAIgA/0NAAECAxAREhMEBQYHFBUWFyACIAP9DQgJCgsYGRobDA0ODxwdHh/9" +
  "5AEhBSAEIAX9DQABAgMEBQYHEBESExQVFhcgBCAF/Q0ICQoLDA0ODxgZGhscHR4f/eQBC6QDAgp/C3sgBSEHA0AgACEKIAIhDCADIQgDQCAKIARB" +
  "AnRqIQsgASENIA0gBmohDiAOIAZqIQ8gDyAGaiEQ/QwAAAAAAAAAAAAAAAAAAAAAIRQgFCEVIBQhFiAUIRcgFCEYIBQhGSAUIRogFCEbIAQhCQNA" +
  "IAr9AAQAIREgC/0ABAAhEiAN/QAEACETIBQgESAT/eYB/eQBIRQgGCASIBP95gH95AEhGCAO/QAEACETIBUgESAT/eYB/eQBIRUgGSASIBP95gH9" +
  "5AEhGSAP/QAEACETIBYgESAT/eYB/eQBIRYgGiASIBP95gH95AEhGiAQ/QAEACETIBcgESAT/eYB/eQBIRcgGyASIBP95gH95AEhGyAKQRBqIQog" +
  "C0EQaiELIA1BEGohDSAOQRBqIQ4gD0EQaiEPIBBBEGohECAJQQRrIgkNAAsgDCAUIBUgFiAXEAD9CwQAIAwgBUECdGohDCAMIBggGSAaIBsQAP0L" +
  "BAAgDCAFQQJ0aiEMIAshCiAIQQJrIggNAAsgASAGQQJ0aiEBIAJBEGohAiAHQQRrIgcNAAsL";
const ROOM = 2 ** 22; // floats for x, y, and a W that is not a parameter. Memory that is not used costs nothing.

export class Kernel {
  // The kernel, with the parameters in its memory; null in a browser without WebAssembly or its SIMD instructions, and
  // if there is no memory.
  static of(parameters) {
    try {
      return new Kernel(parameters);
    } catch {
      return null;
    }
  }

  constructor(parameters) {
    const memory = new WebAssembly.Memory({ initial: Math.ceil((parameters.length + ROOM) / 2 ** 14) }); // of 64 KiB
    this.run = new WebAssembly.Instance(new WebAssembly.Module(bytesOf(BINARY)), { page: { memory } }).exports.product;
    this.floats = new Float32Array(memory.buffer);
    this.floats.set(parameters);
    this.parameters = this.floats.subarray(0, parameters.length);
    this.free = 4 * Math.ceil(parameters.length / 4);
  }

  // x Wᵀ. The kernel takes even numbers of rows, and multiples of four inputs and outputs. Padding of inputs is 0 in x,
  // and finite in W; padding of rows and outputs is not read.
  product(x, { weights, inputs, outputs }) {
    const { floats, free } = this;
    const rows = x.length / inputs;
    const y = new Float32Array(rows * outputs);
    const [wide, high] = [inputs, outputs].map((length) => 4 * Math.ceil(length / 4));
    const xAt = free;
    const yAt = xAt + 2 * Math.ceil(rows / 2) * wide;
    const end = yAt + 2 * Math.ceil(rows / 2) * high;
    let wAt = weights.byteOffset / 4;
    if (weights.buffer !== floats.buffer) {
      floats.set(weights, (wAt = end));
      floats.fill(0, end + weights.length, end + weights.length + 4);
    }
    if (wide !== inputs) floats.fill(0, xAt, yAt);
    for (let r = 0; r < rows; r++) floats.set(x.subarray(r * inputs, (r + 1) * inputs), xAt + r * wide);
    this.run(4 * xAt, 4 * wAt, 4 * yAt, rows + (rows % 2), wide, high, 4 * inputs);
    for (let r = 0; r < rows; r++) y.set(floats.subarray(yAt + r * high, yAt + r * high + outputs), r * outputs);
    return y;
  }
}
