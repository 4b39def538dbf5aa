// Files of the next message: text files of any kind, and the text of PDF files. They are read in the browser.

import { el, icon, iconButton, toast } from './dom.js';
import { filePart } from './turn.js';

const KIB = 1024;
const MOST_FILES = 10;
const MOST_TEXT_BYTES = 512 * KIB;
const MOST_PDF_BYTES = 20 * KIB * KIB;
const MOST_CHARACTERS = 1024 * KIB; // of all files of a message
const ENCODINGS = [['utf-8', [0xef, 0xbb, 0xbf]], ['utf-16le', [0xff, 0xfe]], ['utf-16be', [0xfe, 0xff]]];
const KINDS = { image: 'pictures', audio: 'sounds', video: 'films' };
const CONTROLS = /[\x00-\x08\x0e-\x1a\x1c-\x1f]/;

/** The text of a file's bytes; null if it is not a text file. */
export function textOf(bytes) {
  const [encoding] = ENCODINGS.find(([, mark]) => mark.every((byte, at) => bytes[at] === byte)) ?? [];
  for (const each of encoding ? [encoding] : ['utf-8', 'windows-1252']) {
    try {
      const text = new TextDecoder(each, { fatal: true }).decode(bytes);
      return CONTROLS.test(text) ? null : text;
    } catch {} // not in this encoding
  }
  return null;
}

/** A number of bytes in words. */
export function size(bytes) {
  if (bytes < KIB) return `${bytes} bytes`;
  return bytes < KIB * KIB ? `${(bytes / KIB).toFixed(bytes < 10 * KIB ? 1 : 0)} KiB` : `${(bytes / KIB / KIB).toFixed(1)} MiB`;
}

/** The attached files, with the button that picks them and the chips that show them. */
export class Attachments {
  /** `area` takes files that are dropped. `model()` names the model that counts tokens, and `context()` is its length. */
  constructor({ api, area, input, model, context, changed }) {
    Object.assign(this, { api, area, input, model, context, changed });
    this.files = []; // {name, bytes, text, pages, tokens, abort}; text is null while the file is read
    this.before = Promise.resolve(); // the PDF file before: they are read one after the other, as each may take much memory
    this.chips = el('ul', { class: 'chips', 'aria-label': 'Attached files', hidden: true });
    this.note = el('p', { class: 'chips-note muted', role: 'status', hidden: true });
    this.picker = el('input', { type: 'file', multiple: true, hidden: true, onchange: () => this.pick() });
    this.button = iconButton('file', 'Attach text or PDF files', () => this.picker.click());
    area.addEventListener('dragover', (event) => this.dragged(event));
    area.addEventListener('dragleave', (event) => {
      if (!area.contains(event.relatedTarget)) area.classList.remove('dropping');
    });
    area.addEventListener('drop', (event) => this.dropped(event));
    input.addEventListener('paste', (event) => {
      if (event.clipboardData.files.length === 0) return;
      event.preventDefault();
      this.add(event.clipboardData.files);
    });
  }

  pick() {
    const files = [...this.picker.files];
    this.picker.value = '';
    this.add(files);
  }

  dragged(event) {
    if (!event.dataTransfer.types.includes('Files')) return;
    event.preventDefault();
    event.dataTransfer.dropEffect = 'copy';
    this.area.classList.add('dropping');
  }

  dropped(event) {
    this.area.classList.remove('dropping');
    if (event.dataTransfer.files.length === 0) return;
    event.preventDefault();
    this.add(event.dataTransfer.files);
  }

  /** Whether a file is still being read. */
  get reading() {
    return this.files.some((file) => file.text === null);
  }

  /** Read files and attach them. One that cannot be is named with the reason, and the others are attached. */
  async add(found) {
    await Promise.all([...found].map((file) => this.addOne(file)));
  }

  async addOne(found) {
    const file = { name: found.name || 'pasted.txt', bytes: found.size, text: null, pages: 0, tokens: null, abort: new AbortController() };
    try {
      if (this.files.length >= MOST_FILES) throw new Error(`at most ${MOST_FILES} files can be attached`);
      this.files.push(file);
      this.draw();
      await this.read(file, found);
      if (file.abort.signal.aborted) return;
      const characters = this.files.reduce((sum, each) => sum + (each.text?.length ?? 0), 0);
      if (characters > MOST_CHARACTERS) throw new Error(`the files have ${characters.toLocaleString('en')} characters; a message holds at most ${MOST_CHARACTERS.toLocaleString('en')}`);
    } catch (error) {
      if (file.abort.signal.aborted) return; // it was removed meanwhile
      this.remove(file);
      toast(`“${file.name}” was not attached: ${error.message}`, 'error');
      return;
    }
    this.draw();
    this.count(file);
  }

  async read(file, given) {
    const head = new Uint8Array(await readable(given.slice(0, KIB).arrayBuffer()));
    const isPdf = String.fromCharCode(...head).includes('%PDF-');
    const most = isPdf ? MOST_PDF_BYTES : MOST_TEXT_BYTES;
    if (given.size > most) throw new Error(`it has ${given.size.toLocaleString('en')} bytes; at most ${most.toLocaleString('en')} are taken from a ${isPdf ? 'PDF' : 'text'} file`);
    const bytes = await readable(given.arrayBuffer());
    if (isPdf) {
      const { readPdf } = await import('./pdf.js');
      const found = this.before.then(() => readPdf(bytes, MOST_CHARACTERS, file.abort.signal));
      this.before = found.catch(() => {});
      Object.assign(file, await found);
    } else {
      const text = textOf(new Uint8Array(bytes));
      const kind = /^(image|audio|video)\//.exec(given.type)?.[1];
      if (text === null) throw new Error(kind ? `models here read only text, not ${KINDS[kind]}` : 'it is neither a text file nor a PDF file');
      file.text = text;
    }
  }

  /** Ask the server how many tokens a file takes. */
  async count(file) {
    try {
      const body = { model: this.model(), input: filePart(file.name, file.text) };
      file.tokens = (await this.api.post('/v1/responses/input_tokens', body, { signal: file.abort.signal })).input_tokens;
    } catch {
      return; // the file is sent all the same
    }
    this.draw();
  }

  remove(file) {
    file.abort.abort();
    this.files = this.files.filter((each) => each !== file);
    this.draw();
  }

  /** Take the files for a message: a list of {name, text}. */
  take() {
    const { files } = this;
    this.files = [];
    this.draw();
    return files;
  }

  /** Put files back that were not sent. */
  restore(files) {
    this.files = [...files, ...this.files];
    this.draw();
  }

  draw() {
    const focused = [...this.chips.querySelectorAll('button')].indexOf(document.activeElement);
    this.chips.replaceChildren(...this.files.map((file) => this.chip(file)));
    if (focused >= 0) (this.chips.querySelectorAll('button')[focused] ?? this.input).focus();
    this.chips.hidden = this.files.length === 0;
    const tokens = this.files.reduce((sum, file) => sum + (file.tokens ?? 0), 0);
    const most = this.context();
    const tooMany = most > 0 && tokens >= most;
    this.note.textContent = tooMany ? `The files take about ${tokens.toLocaleString('en')} tokens; the model reads at most ${most.toLocaleString('en')}.` : '';
    this.note.hidden = !tooMany;
    this.changed();
  }

  chip(file) {
    const facts = [size(file.bytes)];
    if (file.pages) facts.push(`${file.pages} ${file.pages === 1 ? 'page' : 'pages'}`);
    if (file.text === null) facts.push('reading …');
    if (file.tokens !== null) facts.push(`${file.tokens.toLocaleString('en')} tokens`);
    return el('li', { class: 'chip' }, icon('file'), el('span', { class: 'name' }, file.name), el('span', { class: 'facts' }, facts.join(' · ')),
      iconButton('close', `Remove ${file.name}`, () => this.remove(file), { class: 'ghost small' }));
  }
}

/** What a promise of a file's bytes gives. A folder, and a file that has gone, cannot be read. */
async function readable(promise) {
  try {
    return await promise;
  } catch {
    throw new Error('it cannot be read; folders cannot be attached');
  }
}
