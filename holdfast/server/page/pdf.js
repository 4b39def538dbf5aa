// Reads the text of a PDF file, in a worker of its own that is ended with it. The worker has no document, and a file that
// takes too long ends with its worker, so that a hostile file harms neither the page nor the server.

const MOST_SECONDS = 60;
const WORKER = new URL('pdf_worker.js', import.meta.url).href;

// The browser runs a worker only from an address that a policy made. This policy knows one address.
const policy = window.trustedTypes?.createPolicy('holdfast-worker', { createScriptURL: () => WORKER });

/** The text and the number of pages of a PDF file: {text, pages}. Throws an Error that says why it has no text. */
export function readPdf(bytes, mostCharacters, signal) {
  return new Promise((resolve, reject) => {
    signal.throwIfAborted();
    const worker = new Worker(policy ? policy.createScriptURL('') : WORKER, { type: 'module' });
    const end = (finish, value) => {
      clearTimeout(timer);
      worker.terminate();
      finish(value);
    };
    const timer = setTimeout(() => end(reject, new Error(`it was not read within ${MOST_SECONDS} seconds`)), MOST_SECONDS * 1000);
    signal.addEventListener('abort', () => end(reject, signal.reason));
    worker.onmessage = ({ data }) => {
      if (typeof data.error === 'string') end(reject, new Error(data.error));
      else if (typeof data.text === 'string') end(resolve, data); // the library in the worker sends messages of its own, too
    };
    worker.onerror = (event) => {
      event.preventDefault();
      end(reject, new Error('the reader of PDF files did not start or ran out of memory'));
    };
    worker.postMessage({ bytes, mostCharacters }, [bytes]);
  });
}
