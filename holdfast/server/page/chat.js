// Chat: conversations of the store, as trees of turns.

import { el } from './dom.js';

let root = null;

export async function mount(element, api) {
  root = element;
  root.append(el('p', {}, `served: ${(await api.get('/v1/models')).data.map((model) => model.id).join(', ')}`));
}

export function unmount() {
  root = null;
}
