// The server's API, with the user's key where one is needed.

const BASE = new URL('../../', import.meta.url);
const STORED = 'holdfast.key';

/** A refusal by the server: its status, its code and its message. */
class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

function storage(kind) {
  try {
    return window[kind];
  } catch {
    return null; // the browser forbids it
  }
}

/** An error of the network in words. Browsers say `Failed to fetch`, `NetworkError` or `Load failed`. */
function unreachable(error) {
  throw error instanceof TypeError ? new Error('The server cannot be reached', { cause: error }) : error;
}

/** Sends requests. `askKey(wrong)` is called where the server wants a key: it resolves with {key, keep} or null. */
export class Api {
  constructor(askKey) {
    this.askKey = askKey;
    this.key = storage('sessionStorage')?.getItem(STORED) ?? storage('localStorage')?.getItem(STORED) ?? '';
    this.asking = null;
    this.onKey = [];
  }

  /** Keep a key: for this tab, or in this browser until it is forgotten. An empty one is forgotten. */
  setKey(key, keep = false) {
    this.key = key;
    storage('sessionStorage')?.removeItem(STORED);
    storage('localStorage')?.removeItem(STORED);
    try {
      if (key) storage(keep ? 'localStorage' : 'sessionStorage')?.setItem(STORED, key);
    } catch {} // the browser has no room: the key lasts as long as the page
    for (const told of this.onKey) told();
  }

  /** One request. Asks for a key where it is missing or wrong, and tries again. Throws ApiError. */
  async fetch(path, { method = 'GET', body, signal, headers = {} } = {}) {
    for (;;) {
      const sent = { ...headers };
      const key = this.key;
      if (key) sent.authorization = `Bearer ${key}`;
      if (body !== undefined) sent['content-type'] = 'application/json';
      const answer = await fetch(new URL(path.replace(/^\//, ''), BASE), {
        method,
        headers: sent,
        body: body === undefined ? undefined : JSON.stringify(body),
        signal,
        cache: 'no-store',
        credentials: 'omit',
        redirect: 'error',
      }).catch(unreachable);
      if (answer.ok) return answer;
      if (answer.status === 401 && (key !== this.key || (await this.needKey(key)))) continue;
      let error = {};
      try {
        error = (await answer.json()).error ?? {};
      } catch {}
      throw new ApiError(answer.status, error.code ?? null, error.message ?? `the server answered ${answer.status}`);
    }
  }

  /** Ask for a key, once for all requests that wait for one. Returns whether there is a new one. */
  async needKey(wrong) {
    this.asking ??= this.askKey(Boolean(wrong)).finally(() => (this.asking = null));
    const given = await this.asking;
    if (given === null || given.key === '') return false;
    if (given.key !== this.key) this.setKey(given.key, given.keep);
    return given.key !== wrong;
  }

  async get(path, options) {
    return (await this.fetch(path, options)).json();
  }

  async post(path, body = {}, options = {}) {
    return (await this.fetch(path, { ...options, method: 'POST', body })).json();
  }

  async delete(path) {
    return (await this.fetch(path, { method: 'DELETE' })).json();
  }

  /** The server-sent events of a request, as {event, data}, where data is parsed JSON; `[DONE]` ends them. */
  async *events(path, options = {}) {
    const answer = await this.fetch(path, options);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = '';
    try {
      for (;;) {
        const { value, done } = await reader.read().catch(unreachable);
        if (done) return;
        rest += value;
        const parts = rest.split(/\r?\n\r?\n/);
        rest = parts.pop();
        for (const part of parts) {
          let event = 'message';
          const data = [];
          for (const line of part.split(/\r?\n/)) {
            if (line.startsWith('event:')) event = line.slice(6).trim();
            else if (line.startsWith('data:')) data.push(line.slice(5).replace(/^ /, ''));
          }
          if (data.length === 0) continue;
          if (data[0] === '[DONE]') return;
          yield { event, data: JSON.parse(data.join('\n')) };
        }
      }
    } finally {
      reader.cancel().catch(() => {});
    }
  }
}
