// Random positions (Ruoss et al. 2023): sorted numbers below `count` in place of 0, 1, 2, … They are those of JAX. They
// depend only on the first token and the length of the text: mini_gpt/model/layout.py.

const ROTATIONS = [
  [13, 15, 26, 6],
  [17, 29, 16, 24],
];

// Threefry-2x32 with 20 rounds (Salmon et al. 2011): two random words of 32 bits, by a key of two words and a counter.
function threefry([first, second], [high, low]) {
  const keys = [first, second, first ^ second ^ 0x1bd11bda];
  let x = (high + keys[0]) | 0;
  let y = (low + keys[1]) | 0;
  for (let group = 0; group < 5; group++) {
    for (const bits of ROTATIONS[group % 2]) {
      x = (x + y) | 0;
      y = ((y << bits) | (y >>> (32 - bits))) ^ x;
    }
    x = (x + keys[(group + 1) % 3]) | 0;
    y = (y + keys[(group + 2) % 3] + group + 1) | 0;
  }
  return [x, y];
}

// The `length` places with the largest of `count` random numbers, sorted. Of equal numbers, the first is taken.
export function randomPositions(firstToken, length, count) {
  const key = threefry([0, 0], [0, firstToken]); // jax.random.fold_in(jax.random.key(0), firstToken)
  const numbers = Uint32Array.from({ length: count }, (_, place) => {
    const [x, y] = threefry(key, [0, place]);
    return (x ^ y) >>> 9; // the 23 bits of a float32 in [0, 1)
  });
  const order = Uint32Array.from(numbers.keys()).sort((a, b) => numbers[b] - numbers[a] || a - b);
  return Int32Array.from(order.subarray(0, length)).sort();
}
