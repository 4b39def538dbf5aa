// Engine: the engine at work.
// mount(element, api): draw into the empty element; api is api.js's Api: get(path), post(path, body), and events(path, {signal}),
// an async iterator of {event, data}. unmount(): end streams and timers; the element is emptied afterwards.
// Rules of the page's policy: no innerHTML or any string as markup (Trusted Types forbid it: build with dom.js's el and
// svg, or draw on a canvas), no style attributes in markup (element.style.name = value is allowed), nothing from elsewhere.
// document fires `themechange` when the theme is switched.

import { el } from './dom.js';

export async function mount(element, api) {
  element.append(el('h2', {}, 'Engine'));
}

export function unmount() {}
