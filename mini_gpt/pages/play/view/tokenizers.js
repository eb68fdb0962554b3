// Text to token ids and back, equal to mini_gpt/data/tokenizers.py. tokenizer.py describes a run's tokenizer.

const utf8 = new TextEncoder();
const decoded = (bytes) => new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes);
const asLatin1 = (bytes) => Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
const latin1 = (text) => Uint8Array.from(text, (character) => character.charCodeAt(0));

// The bytes of a character beyond ASCII, or one byte that is only a part of one.
const CHARACTER = /[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}|[\x80-\xff]/g;

// The common part: `texts` are the tokens' bytes. encode(text) returns {ids, unknown}, the parts without a token.
export class Tokenizer {
  static of(data) {
    return new { bytes: ByteTokenizer, characters: ListTokenizer, words: ListTokenizer, bpe: BpeTokenizer }[data.kind](
      data,
    );
  }
  constructor(data) {
    Object.assign(this, data, { texts: data.texts.map(latin1) });
  }
  // The text of tokens; bytes that are not UTF-8 become U+FFFD. Ids above those of the tokenizer are ignored.
  decode(ids) {
    const texts = Array.from(ids, (id) => this.texts[id] ?? new Uint8Array());
    const bytes = new Uint8Array(texts.reduce((sum, text) => sum + text.length, 0));
    let at = 0;
    for (const text of texts) {
      bytes.set(text, at);
      at += text.length;
    }
    return decoded(bytes);
  }
  // A token's text, to be shown: a byte that is only a part of a character is hexadecimal, as \xc3.
  textOf(id) {
    return String.fromCharCode(...(this.texts[id] ?? [])).replace(CHARACTER, (bytes) =>
      bytes.length > 1 ? decoded(latin1(bytes)) : `\\x${bytes.charCodeAt(0).toString(16)}`,
    );
  }
  // Where the tokens are in a text that they restore: [{first, last, start, end}], runs of tokens that hold whole
  // characters, from start to end in UTF-16 units. null if the tokens do not restore the text. Text between spans
  // has no token.
  spans(ids, text) {
    if (this.decode(ids) !== text) return null;
    const ends = new Map([[0, 0]]); // {bytes: UTF-16 units} at the ends of characters
    let bytes = 0;
    let units = 0;
    for (const character of text) {
      const point = character.codePointAt(0);
      bytes += 1 + [0x80, 0x800, 0x10000].filter((first) => point >= first).length;
      units += character.length;
      ends.set(bytes, units);
    }
    const found = [];
    let first = 0;
    let start = 0;
    let at = 0;
    ids.forEach((id, n) => {
      at += this.texts[id].length;
      const end = ends.get(at);
      if (end === undefined) return;
      found.push({ first, last: n, start, end });
      [first, start] = [n + 1, end];
    });
    return found;
  }
}

class ByteTokenizer extends Tokenizer {
  encode(text) {
    return { ids: Array.from(utf8.encode(text)), unknown: [] };
  }
}

// Characters, or words by an expression. What has no token is left out.
class ListTokenizer extends Tokenizer {
  constructor(data) {
    super(data);
    this.idOf = new Map(this.texts.map((text, id) => [decoded(text), id]));
    this.idOf.delete(""); // the separator
    this.part = new RegExp(data.pattern ?? ".", "gsu");
  }
  encode(text) {
    const parts = text.match(this.part) ?? [];
    const ids = parts.map((part) => this.idOf.get(part));
    return { ids: ids.filter((id) => id !== undefined), unknown: parts.filter((_, n) => ids[n] === undefined) };
  }
  spans(ids, text) {
    const known = [...text.matchAll(this.part)].filter(([part]) => this.idOf.has(part));
    return known.map((part, n) => ({ first: n, last: n, start: part.index, end: part.index + part[0].length }));
  }
}

const MOST_WORDS = 20000; // in the cache

// BPE of the tokenizers library, on bytes or, without ByteLevel, on characters.
class BpeTokenizer extends Tokenizer {
  constructor(data) {
    super(data);
    const size = this.texts.length;
    this.size = size;
    this.merged = new Map(); // {pair: [rank, merged id]}
    for (let n = 0; n < data.merges.length; n += 3)
      this.merged.set(data.merges[n] * size + data.merges[n + 1], [n / 3, data.merges[n + 2]]);
    const compiled = (step) => ({ ...step, pattern: step.pattern && new RegExp(step.pattern, "gu") });
    this.steps = data.pre_tokenizer.map(compiled);
    this.normalizers = data.normalizer.map(compiled);
    this.byName = data.whole && new Map(Object.entries(data.whole));
    this.characterIds = new Map(Object.entries(data.characters));
    this.raw = matcherOf(
      data.added.filter((token) => !token.normalized),
      (text) => text,
    );
    this.later = matcherOf(
      data.added.filter((token) => token.normalized),
      (text) => this.normalized(text),
    );
    this.words = new Map();
  }

  encode(text) {
    const ids = [...this.before];
    const unknown = [];
    let first = true;
    text = text.toWellFormed?.() ?? text;
    for (const [outer, added] of cut(text, this.raw)) {
      if (added !== null) {
        ids.push(added);
        first = false;
        continue;
      }
      for (const [inner, token] of cut(this.normalized(outer), this.later)) {
        if (token !== null) ids.push(token);
        else for (const word of this.split(inner, first)) for (const id of this.word(word, unknown)) ids.push(id);
        first = false;
      }
    }
    ids.push(...this.after);
    if (this.drops_separator && ids.at(-1) === this.separator) ids.pop();
    return { ids, unknown };
  }

  normalized(text) {
    for (const { type, pattern, content } of this.normalizers) {
      if (type === "Lowercase")
        text = Array.from(text, (character) => character.toLowerCase()).join(""); // not by context
      else if (type === "Prepend") text = text && content + text;
      else if (type === "Replace") text = text.replace(pattern, () => content);
      else text = text.normalize(type);
    }
    return text;
  }

  // The words of a text, in which tokens are merged.
  split(text, isFirst) {
    let words = text ? [text] : [];
    for (const step of this.steps) words = words.flatMap((word, n) => splitBy(word, step, isFirst && n === 0));
    return words;
  }

  word(word, unknown) {
    let found = this.words.get(word);
    if (!found) {
      if (this.words.size >= MOST_WORDS) this.words.clear();
      found = this.encodeWord(word);
      this.words.set(word, found);
    }
    if (found.unknown.length) unknown.push(...found.unknown);
    return found.ids;
  }

  encodeWord(word) {
    const whole = this.byName?.get(this.byte_level ? asLatin1(utf8.encode(word)) : word);
    if (whole !== undefined) return { ids: [whole], unknown: [] };
    const ids = [];
    const unknown = [];
    if (this.byte_level)
      ids.push(...Array.from(utf8.encode(word), (byte) => this.bytes[byte]).filter((id) => id !== null));
    else for (const character of word) this.addCharacter(character, ids, unknown);
    return { ids: this.merge(ids), unknown };
  }

  addCharacter(character, ids, unknown) {
    const id = this.characterIds.get(character);
    const bytes = Array.from(utf8.encode(character), (byte) => this.bytes[byte]);
    if (id !== undefined) return ids.push(id);
    if (!bytes.includes(null)) return ids.push(...bytes);
    unknown.push(character);
    if (this.unknown !== null && !(this.fuse_unknown && ids.at(-1) === this.unknown)) ids.push(this.unknown);
  }

  // Merge the pair of the lowest rank, the first of equal ones, until no pair can be merged.
  merge(ids) {
    const rank = ids.map((id, n) => this.rank(id, ids[n + 1]));
    for (;;) {
      let at = -1;
      let lowest = Infinity;
      for (let n = 0; n < rank.length; n++) if (rank[n] < lowest) [at, lowest] = [n, rank[n]];
      if (at < 0) return ids;
      ids.splice(at, 2, this.merged.get(ids[at] * this.size + ids[at + 1])[1]);
      rank.splice(at, 1);
      rank[at] = this.rank(ids[at], ids[at + 1]);
      if (at > 0) rank[at - 1] = this.rank(ids[at - 1], ids[at]);
    }
  }
  rank(left, right) {
    return right === undefined ? Infinity : (this.merged.get(left * this.size + right)?.[0] ?? Infinity);
  }
}

// An expression that finds the longest of the tokens at a place, and their ids. null without tokens.
function matcherOf(added, normalized) {
  if (!added.length) return null;
  const idOf = new Map(added.map(({ text, id }) => [normalized(text), id]));
  const escaped = [...idOf.keys()]
    .sort((a, b) => b.length - a.length)
    .map((text) => text.replace(/[\\^$.*+?()[\]{}|/-]/g, "\\$&"));
  return { idOf, pattern: new RegExp(escaped.join("|"), "gu") };
}

// [[text, token or null]] of a text with added tokens in it.
function cut(text, matcher) {
  if (!matcher) return [[text, null]];
  return parted(text, matcher.pattern).map(([part, matched]) => [part, matched ? matcher.idOf.get(part) : null]);
}

function splitBy(word, step, isFirst) {
  if (step.type === "ByteLevel") {
    const text = step.prefix && !word.startsWith(" ") ? ` ${word}` : word;
    return step.pattern ? parted(text, step.pattern).map(([part]) => part) : [text];
  }
  if (step.type === "Metaspace") {
    const { replacement, prepend_scheme: scheme, split } = step;
    let text = word.replaceAll(" ", replacement);
    if ((scheme === "always" || (scheme === "first" && isFirst)) && !text.startsWith(replacement))
      text = replacement + text;
    return split ? text.split(new RegExp(`(?=${replacement})`, "u")).filter(Boolean) : [text];
  }
  const parts = parted(word, step.pattern).map(([part, matched]) => [part, matched !== step.invert]);
  if (step.behavior === "Isolated") return parts.map(([part]) => part);
  if (step.behavior === "Removed") return parts.filter(([, matched]) => !matched).map(([part]) => part);
  return merged(parts, step.behavior === "MergedWithPrevious");
}

// [[part, whether it is a match]] of a text.
function parted(text, pattern) {
  const parts = [];
  let at = 0;
  for (const match of text.matchAll(pattern)) {
    if (!match[0]) continue;
    if (match.index > at) parts.push([text.slice(at, match.index), false]);
    parts.push([match[0], true]);
    at = match.index + match[0].length;
  }
  if (at < text.length) parts.push([text.slice(at), false]);
  return parts;
}

// The words after each match is joined with the text before it, or else with the text after it.
function merged(parts, withPrevious) {
  const words = [];
  parts.forEach(([part, matched], n) => {
    const joined = n > 0 && matched === withPrevious && parts[n - 1][1] !== withPrevious;
    words.push(joined ? words.pop() + part : part);
  });
  return words;
}
