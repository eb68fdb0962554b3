"use strict";
// Arrays that Python has put into a page: base64, with or without zlib.

function bytesOf(text) {
  const decoded = atob(text);
  const bytes = new Uint8Array(decoded.length);
  for (let n = 0; n < decoded.length; n++) bytes[n] = decoded.charCodeAt(n);
  return bytes;
}

// Decompress what zlib.compress wrote.
async function unpack(text) {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
