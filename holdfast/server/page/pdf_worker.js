// The worker that takes the text out of one PDF file. It gets {bytes, mostCharacters} and answers {text, pages} or {error}.

import { VerbosityLevel, getDocument } from './vendor/pdf.js';
import './vendor/pdf_parser.js'; // the library finds it and starts no worker within this one

const MOST_PAGES = 2_000;
const CMAPS = { cMapUrl: new URL('vendor/cmaps/', import.meta.url).href, cMapPacked: true, useWorkerFetch: true }; // encodings that files need not contain
const SAFE = { disableFontFace: true, useSystemFonts: false, useWasm: false, enableXfa: false, isEvalSupported: false, isOffscreenCanvasSupported: false, isImageDecoderSupported: false, verbosity: VerbosityLevel.ERRORS };

self.onmessage = async ({ data: { bytes, mostCharacters } }) => {
  try {
    self.postMessage(await textOf(bytes, mostCharacters));
  } catch (error) {
    self.postMessage({ error: reason(error) });
  }
};

function reason(error) {
  if (error.name === 'PasswordException') return 'it is protected by a password';
  if (error.name === 'InvalidPDFException') return 'it is a damaged PDF file';
  if (error.name === 'Refused') return error.message;
  return `it cannot be read as a PDF file (${String(error.message).slice(0, 200)})`;
}

function refuse(text) {
  throw Object.assign(new Error(text), { name: 'Refused' });
}

async function textOf(bytes, mostCharacters) {
  const pdf = await getDocument({ data: new Uint8Array(bytes), ...SAFE, ...CMAPS }).promise;
  const pages = pdf.numPages;
  if (pages > MOST_PAGES) refuse(`it has ${pages} pages; at most ${MOST_PAGES} are read`);
  const found = [];
  let length = 0;
  for (let number = 1; number <= pages; number += 1) {
    const page = await pdf.getPage(number);
    const text = linesOf((await page.getTextContent()).items);
    page.cleanup();
    length += text.length;
    if (length > mostCharacters) refuse(`its text has more than ${mostCharacters.toLocaleString('en')} characters`);
    if (text) found.push(pages > 1 ? `[Page ${number}]\n${text}` : text);
  }
  if (found.length === 0) refuse('it has no text; its pages may be pictures');
  return { text: found.join('\n\n'), pages };
}

function linesOf(items) {
  return items.map(({ str, hasEOL }) => (hasEOL ? `${str}\n` : str)).join('').replace(/[ \t]+$/gm, '').replace(/\0/g, '').trim();
}
