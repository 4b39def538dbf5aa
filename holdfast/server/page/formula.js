// Draws formulas with KaTeX, which is loaded with the first one. Until then, and if it cannot be drawn, a formula is shown
// as its source. KaTeX builds elements; no string becomes markup.

import { el } from './dom.js';

const OPTIONS = { throwOnError: true, strict: 'ignore', trust: refuse, maxSize: 20, maxExpand: 300 };
const DEFINES = /\\(?:[gex]?def|global|long|let|futurelet|(?:re|provide)?newcommand|renewcommand|providecommand)(?![a-zA-Z])/;
const MOST_NODES = 20_000; // elements of one formula
const MOST_LEVELS = 300; // elements within each other
const MOST_KEPT = 100_000; // elements of formulas that are kept for drawing them again
const SLICE = { least: 20, most: 100 }; // milliseconds of drawing between two frames

const kept = new Map(); // by source and kind: the drawn formula, or an error; the oldest one comes first
let keptNodes = 0; // number of elements in `kept`
const waiting = []; // elements that are not drawn yet, with their formulas
let drawing = false;
let library = null;

/** The element of a formula. `raw` is its source with the marks around it, `tex` without them. */
export function formula({ raw, tex, display }) {
  const element = el('span', display
    ? { class: 'formula display', tabindex: '0', role: 'group', 'aria-label': 'Formula' }
    : { class: 'formula' }, raw.trim());
  const key = (display ? 'display ' : 'line ') + tex;
  if (kept.has(key)) show(element, kept.get(key));
  else {
    waiting.push({ element, tex, display, key });
    if (!drawing) drawAll();
  }
  return element;
}

/** Refuse a command that needs trust: one that links, loads a picture or sets styles. */
function refuse({ command }) {
  throw new Error(`${command} is not allowed`);
}

/** Draw what waits, a little between every two frames, so that an answer of many formulas does not stop the page. */
async function drawAll() {
  drawing = true;
  try {
    library ??= load();
    const katex = await library;
    let slice = SLICE.least;
    while (waiting.length > 0) {
      const end = performance.now() + slice;
      while (waiting.length > 0 && performance.now() < end) {
        const { element, tex, display, key } = waiting.shift();
        show(element, kept.get(key) ?? keep(key, made(katex, tex, display)));
      }
      if (waiting.length === 0) break;
      const before = performance.now();
      await new Promise(requestAnimationFrame);
      slice = Math.min(SLICE.most, Math.max(SLICE.least, performance.now() - before)); // at least half of the time draws
    }
  } catch {
    library = null; // the sources stay; the next formula tries again
    waiting.length = 0;
  } finally {
    drawing = false;
  }
}

/** Load KaTeX and its styles. */
async function load() {
  const style = el('link', { rel: 'stylesheet', href: new URL('vendor/katex.css', import.meta.url) });
  const styled = new Promise((resolve, reject) => {
    style.onload = resolve;
    style.onerror = () => {
      style.remove();
      reject(new Error('the styles of formulas could not be loaded'));
    };
  });
  document.head.append(style);
  const [module] = await Promise.all([import('./vendor/katex.js'), styled]);
  return module.default;
}

/** A formula's elements, or an Error. A formula that defines commands is refused: its size has no bound. */
function made(katex, tex, display) {
  if (DEFINES.test(tex)) return new Error('commands cannot be defined');
  const box = el('span');
  try {
    katex.render(tex, box, { ...OPTIONS, displayMode: display });
  } catch (error) {
    return error instanceof RangeError ? new Error('it is nested too deeply') : error;
  }
  const nodes = box.getElementsByTagName('*');
  if (nodes.length > MOST_NODES) return new Error(`it has ${nodes.length} elements, and at most ${MOST_NODES} are drawn`);
  if (levels(box) > MOST_LEVELS) return new Error('it is nested too deeply');
  return box.firstChild;
}

/** How many elements are within each other. */
function levels(box) {
  const walker = document.createTreeWalker(box, NodeFilter.SHOW_ELEMENT);
  let most = 0;
  for (let level = 0; ; ) {
    if (walker.firstChild()) level += 1;
    else {
      while (!walker.nextSibling()) {
        if (!walker.parentNode()) return most;
        level -= 1;
      }
    }
    most = Math.max(most, level);
  }
}

/** Keep a drawn formula, and forget the oldest ones if there are too many elements. Returns it. */
function keep(key, drawn) {
  kept.set(key, drawn);
  keptNodes += size(drawn);
  for (const [other, each] of kept) {
    if (keptNodes <= MOST_KEPT) break;
    kept.delete(other);
    keptNodes -= size(each);
  }
  return drawn;
}

const size = (drawn) => (drawn instanceof Error ? 1 : drawn.getElementsByTagName('*').length + 1);

function show(element, drawn) {
  if (drawn instanceof Error) {
    element.classList.add('faulty');
    element.title = `This formula cannot be drawn: ${drawn.message}`;
  } else element.replaceChildren(drawn.cloneNode(true));
}
