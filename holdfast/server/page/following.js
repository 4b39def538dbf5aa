// Follows an answer while the server writes it, over a connection that may break, and stops it.

import { toast } from './dom.js';

const TRIES = 6; // to take up an answer's stream again after the connection broke: 25 seconds in all
const LAST = new Set(['response.completed', 'response.incomplete', 'response.failed']);

/** An answer that is being written. `id` is null until the server has taken the request. */
export class Following {
  constructor(api, id = null) {
    this.api = api;
    this.id = id;
    this.stopped = false; // the user wants it to stop
    this.told = false; // the server knows that
    this.left = false; // the page has turned away from it; it goes on being written
    this.note = null; // says that the connection broke, until the answer goes on
    this.connection = new AbortController();
  }

  /** Turn away. A request that the server has not taken yet is not ended, or the message would be lost. */
  leave() {
    this.left = true;
    this.note?.remove();
    if (this.id) this.connection.abort();
  }

  /**
   * Yield the answer's events up to the last one, or until the page turns away. `path` and `options` are the request that
   * begins the stream; after a break it goes on from the last event. Throws if the server takes no request, or after too
   * many breaks.
   */
  async *events(path, options = {}) {
    const { signal } = this.connection;
    let number = -1;
    for (let tries = 0; ; tries += 1) {
      const again = `/v1/responses/${this.id}?stream=true${number >= 0 ? `&starting_after=${number}` : ''}`;
      try {
        for await (const { data } of tries === 0 ? this.api.events(path, { ...options, signal }) : this.api.events(again, { signal })) {
          tries = 0;
          this.note?.remove();
          if (data.type === 'error') throw new Error(data.message);
          number = data.sequence_number;
          if (data.type === 'response.created') this.id = data.response.id;
          if (this.stopped && this.id && !this.told) this.tell();
          yield data;
          if (this.left || LAST.has(data.type)) return;
        }
        throw new Error(this.id ? 'The stream ended before the answer' : 'The server ended the answer before it began');
      } catch (error) {
        if (this.left || this.id === null || tries >= TRIES || error.status < 500) {
          this.note?.remove();
          throw error;
        }
        if (tries === 1) this.note = toast('The connection broke. Connecting again…', 'info', { stays: true });
        await new Promise((resume) => setTimeout(resume, 400 * 2 ** tries));
      }
    }
  }

  /** Stop the answer. What there is of it stays. */
  async stop() {
    if (this.stopped) return;
    this.stopped = true;
    if (this.id) await this.tell();
  }

  async tell() {
    this.told = true;
    try {
      await this.api.post(`/v1/responses/${this.id}/cancel`);
    } catch (error) {
      this.stopped = this.told = false;
      toast(error.message, 'error');
    }
  }
}

/** What a turn says whose stream was lost. */
export function lost(error) {
  return { message: `The connection broke. ${error.message}. Reload the page to see what became of the answer.` };
}
