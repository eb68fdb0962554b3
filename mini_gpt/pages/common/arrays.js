// Arrays: those that Python has put into a page, as base64, with or without zlib; and how two of them begin.

export function bytesOf(text) {
  const decoded = atob(text);
  const bytes = new Uint8Array(decoded.length);
  for (let n = 0; n < decoded.length; n++) bytes[n] = decoded.charCodeAt(n);
  return bytes;
}

// Decompress what zlib.compress wrote.
export async function unpack(text) {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// The number of entries with which two arrays begin alike.
export function commonStart(a, b) {
  let n = 0;
  while (n < a.length && n < b.length && a[n] === b[n]) n++;
  return n;
}
