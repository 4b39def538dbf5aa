// Markdown with formulas: marked's lexer, which also finds TeX between \( \), \[ \], $ $ and $$ $$. It makes tokens and
// draws nothing. Code comes first: what stands in a code block or between backticks is never a formula.

import { Lexer, Tokenizer, defaults } from './vendor/marked.js';

const MOST = { line: 1_000, display: 5_000 }; // characters of a formula; a longer one stays text
const MARKS = [
  { open: '\\[', close: '\\]', display: true },
  { open: '\\(', close: '\\)', display: false },
  { open: '$$', close: '$$', display: true },
  { open: '$', close: '$', display: false },
];
const OPENS = /\$|\\[([]/;
const OPENS_NEXT_LINE = /\n {0,3}(?:\\\[|\$\$)/;
const OPEN_DOLLARS = /^\$\$(?!\$)(?:\S|[ \t]*(?:\n|$))/;
const BLANK = /\n[ \t]*\n/;
const SIGNS = /[\\^_{}=<>+*/|]/; // without one of these, words between dollars are prose
const WORD = /\p{L}{2}/u;

/** Split Markdown into marked's tokens, {type: 'formula', raw, tex, display}, and {type: 'source', raw} for plain text. */
export function lex(text) {
  return OPENS.test(text) ? new FormulaLexer().lex(text) : new Lexer().lex(text);
}

/** The formula that the text begins with; null if it begins with none. One that is not closed is a token of source. */
function formulaAt(text, before = '') {
  const mark = MARKS.find(({ open }) => text.startsWith(open));
  if (!mark) return null;
  const from = mark.open.length;
  const end = closing(text, from, mark);
  if (end < 0) return mark.open[0] === '\\' ? source(text) : null;
  const inside = text.slice(from, end);
  const token = { type: 'formula', raw: text.slice(0, end + from), tex: inside.trim(), display: mark.display };
  if (mark.open === '\\(') return token;
  if (mark.open === '\\[') return isNote(inside) ? null : token;
  const after = text[end + from] ?? '';
  return (mark.display ? isBetweenTwoDollars : isBetweenDollars)(inside, before, after) ? token : null;
}

/** Where the mark that closes a formula stands; -1 if it is missing or too far away. */
function closing(text, from, { close, display }) {
  const last = Math.min(text.length - close.length, from + MOST[display ? 'display' : 'line']);
  for (let at = from; at <= last; at += 1) {
    if (text.startsWith(close, at)) return at > from ? at : -1;
    if (text[at] === '\\') {
      if (close[0] === '\\' && /[[(]/.test(text[at + 1])) return -1; // another formula opens
      at += 1; // in TeX the next character belongs to the backslash, as in \\[2pt] and \$
    } else if (!display && text[at] === '\n' && BLANK.test(text.slice(at, at + 80).replace(/\S[^]*/, ''))) return -1;
  }
  return -1;
}

/** The beginning of a formula, as text: as far as the next one, or the next empty line. */
function source(text) {
  const next = text.slice(2).search(/\\[([]|\n[ \t]*\n/);
  return { type: 'source', raw: next < 0 ? text : text.slice(0, next + 2) };
}

/** Whether brackets hold a word or a number, as in a quotation or a reference, and no formula. */
function isNote(inside) {
  return !SIGNS.test(inside) && inside.trim() === inside && (WORD.test(inside) || /^[\d\s,.–-]+$/.test(inside));
}

/** Whether text between single dollars is a formula. Prices, variables of a shell and prose are not. */
function isBetweenDollars(inside, before, after) {
  if (/[\w$\\]/.test(before) || /[\d$]/.test(after)) return false;
  if (/^\s|\s$|`/.test(inside)) return false;
  if (/[A-Za-z_]/.test(after) && inside.length > 1 && !/[\\^{]/.test(inside)) return false;
  return SIGNS.test(inside) || !(/\s/.test(inside) && WORD.test(inside));
}

/** Whether text between double dollars is a formula. Classes of price, as of restaurants, are not. */
function isBetweenTwoDollars(inside, before, after) {
  const tex = inside.trim();
  if (/[\w$\\]/.test(before) || after === '$' || BLANK.test(tex) || !tex) return false;
  return /[\\^_={]/.test(tex) || !(/\s/.test(tex) && WORD.test(tex));
}

/** A formula on lines of its own, with the punctuation after it. */
function displayBlock(text) {
  const indent = /^ {0,3}(?=\\\[|\$\$)/.exec(text)?.[0];
  if (indent === undefined) return undefined;
  const rest = text.slice(indent.length);
  const found = formulaAt(rest) ?? (OPEN_DOLLARS.test(rest) && closing(rest, 2, MARKS[2]) < 0 ? source(rest) : null);
  if (found === null) return undefined;
  if (found.type === 'source') return { ...found, raw: indent + found.raw };
  const [tail, point] = /^[ \t]*([.,;:]?)[ \t]*(?:\n|$)/.exec(rest.slice(found.raw.length)) ?? ['', ''];
  return { ...found, raw: indent + found.raw + tail, tex: found.tex + point };
}

/** Put letters in place of the formulas of a line, so that no sign within them ends an emphasis. */
function masked(text, mask) {
  let made = '';
  let at = 0;
  while (at < text.length) {
    const code = text[at] === '`' ? /^(`+)(?!`)[^]*?(?<!`)\1(?!`)/.exec(text.slice(at)) : null;
    const found = code ? null : formulaAt(text.slice(at), text[at - 1]);
    const length = code?.[0].length ?? found?.raw.length ?? (text[at] === '\\' ? 2 : text[at] === '`' ? /^`+/.exec(text.slice(at))[0].length : 1);
    made += found ? 'a'.repeat(length) : mask.slice(at, at + length);
    at += length;
  }
  return made;
}

class FormulaTokenizer extends Tokenizer {
  /** A heading that is underlined. A line with only = within a formula underlines nothing. */
  lheading(text) {
    const token = super.lheading(text);
    if (!token || !OPENS_NEXT_LINE.test(token.raw)) return token;
    this.lexer.inlineQueue.pop();
    return undefined;
  }
}

class FormulaLexer extends Lexer {
  constructor() {
    const extensions = {
      block: [displayBlock],
      startBlock: [(text) => text.slice(0, BLANK.exec(text)?.index).search(OPENS_NEXT_LINE)],
      inline: [(text) => formulaAt(text, this.line[this.line.length - text.length - 1]) ?? undefined],
      startInline: [(text) => /^[^\\<![`*_~$]*\$/.exec(text)?.[0].length - 1],
    };
    const hooks = { emStrongMask: (mask) => (OPENS.test(this.line) ? masked(this.line, mask) : mask) };
    super({ ...defaults, tokenizer: new FormulaTokenizer(), extensions, hooks });
    this.line = '';
  }

  inlineTokens(text, tokens) {
    const outer = this.line;
    this.line = text;
    try {
      return super.inlineTokens(text, tokens);
    } finally {
      this.line = outer;
    }
  }
}
