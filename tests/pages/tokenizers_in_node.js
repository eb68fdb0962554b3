// Answers of the page's tokenizers, a line each: {use: data}, {encode: text}, {decode: ids} or {spans: text}.
const fs = require("fs"), readline = require("readline");
const source = fs.readFileSync(process.argv[2], "utf8").replace(/^export /gm, "");
const Tokenizer = new Function(`${source}; return Tokenizer;`)();
let tokenizer;
const answers = {
  use: (data) => { tokenizer = Tokenizer.of(data); return null; },
  encode: (text) => tokenizer.encode(text),
  decode: (ids) => tokenizer.decode(ids),
  textOf: (id) => tokenizer.textOf(id),
  spans: (text) => tokenizer.spans(tokenizer.encode(text).ids, text),
};
readline.createInterface({ input: process.stdin }).on("line", (line) => {
  const [[name, value]] = Object.entries(JSON.parse(line));
  process.stdout.write(`${JSON.stringify(answers[name](value))}\n`);
});
