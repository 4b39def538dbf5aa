// Builds elements. Text becomes text nodes and nothing else, so no string can become markup.

const SVG = 'http://www.w3.org/2000/svg';

/** An element: `properties` are attributes, `on…` handlers or `class`; a child is a node, a text, or nothing. */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name === 'value') element.value = value;
    else element.setAttribute(name, value === true ? '' : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An SVG element, as `el` makes an HTML one. */
export function svg(tag, properties = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(properties)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

/** Let an element have these children. Those that it has are not taken out, so they keep the focus and their scrolling. */
export function place(parent, children) {
  const wanted = new Set(children);
  for (const each of [...parent.childNodes]) if (!wanted.has(each)) each.remove();
  let next = parent.firstChild;
  for (const each of wanted) {
    if (each === next) next = next.nextSibling;
    else parent.insertBefore(each, next);
  }
}

/** Draw an element's buttons anew. The focus goes to the button with the name of the one that had it. */
export function renew(parent, buttons) {
  const held = parent.contains(document.activeElement) ? document.activeElement : null;
  parent.replaceChildren(...buttons);
  if (held) focusNamed(parent, held);
}

/** Focus the button of an element that has another one's name; if it is disabled, the one next to it. */
export function focusNamed(element, { ariaLabel }) {
  const button = ariaLabel && element.querySelector(`button[aria-label="${CSS.escape(ariaLabel)}"]`);
  const open = button?.disabled ? button.parentElement.querySelector('button:enabled') : button;
  open?.focus({ preventScroll: true });
}

const ICONS = {
  plus: 'M12 5v14M5 12h14',
  search: 'M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14zM16.5 16.5 21 21',
  send: 'M12 19V5M6 11l6-6 6 6',
  stop: 'M7 7h10v10H7z',
  copy: 'M9 9h11v11H9zM5 15H4V4h11v1',
  edit: 'M4 20h4L19 9l-4-4L4 16zM13 7l4 4',
  retry: 'M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6',
  left: 'M14 6l-6 6 6 6',
  right: 'M10 6l6 6-6 6',
  menu: 'M4 7h16M4 12h16M4 17h16',
  close: 'M6 6l12 12M18 6 6 18',
  more: 'M5 12h.01M12 12h.01M19 12h.01',
  settings: 'M4 8h9M17 8h3M15 6v4M4 16h3M11 16h9M9 14v4',
  sun: 'M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.5 1.5M17.5 17.5 19 19M19 5l-1.5 1.5M6.5 17.5 5 19',
  moon: 'M20 14.5A8 8 0 0 1 9.5 4 8 8 0 1 0 20 14.5z',
  auto: 'M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18zM12 3v18',
  key: 'M8 11a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM11 13l8-8M16 8l3 3',
  keyboard: 'M3 7h18v10H3zM7 11h.01M11 11h.01M15 11h.01M8 14h8',
  trash: 'M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13',
  down: 'M12 5v14M6 13l6 6 6-6',
  file: 'M6 3h8l4 4v14H6zM14 3v4h4',
  import: 'M12 4v11M7 10l5 5 5-5M4 20h16',
  export: 'M12 15V4M7 9l5-5 5 5M4 20h16',
  columns: 'M4 5h16v14H4zM12 5v14',
  tools: 'M14.5 6.5a4 4 0 0 0-5 5L4 17l3 3 5.500-5.500a4 4 0 0 0 5-5L15 12l-3-3z',
  branches: 'M7 4v16M7 9c0 4 10 2 10 6v5M5 4h4M5 20h4M15 20h4',
  check: 'M5 12.5l4.5 4.5L19 7.5',
};

/** One of the line icons, hidden from screen readers: the button around it has a name. */
export function icon(name) {
  const path = svg('path', { d: ICONS[name] });
  return svg('svg', { viewBox: '0 0 24 24', class: 'icon', 'aria-hidden': 'true', focusable: 'false' }, path);
}

/** A button with an icon. `label` is its name for screen readers, and its tooltip. */
export function iconButton(name, label, onclick, properties = {}) {
  return el('button', { type: 'button', class: 'ghost', 'aria-label': label, title: label, onclick, ...properties }, icon(name));
}

/** Copy a text to the clipboard. Returns whether the browser allowed it. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {} // without TLS, a page of another machine has no such interface: copy a selection
  const held = document.activeElement;
  const area = el('textarea', { class: 'sr', readonly: true, value: text });
  (document.querySelector('dialog[open]') ?? document.body).append(area);
  area.select();
  const done = document.execCommand('copy');
  area.remove();
  held?.focus({ preventScroll: true });
  return done;
}

/** Save a text as a file. It is never opened here, whatever it is. */
export function download(name, text, type = 'text/plain') {
  const url = URL.createObjectURL(new Blob([text].flat(), { type }));
  el('a', { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

const MOST_TOASTS = 4;

/**
 * Says something at the top of the page, where it covers no field and takes no click: for a moment, or until the returned
 * element is removed if it `stays`.
 */
export function toast(text, kind = 'info', { stays = false } = {}) {
  const shown = el('div', { class: `toast ${kind}` }, text);
  const box = document.getElementById('toasts');
  box.append(shown);
  while (box.children.length > MOST_TOASTS) box.firstChild.remove();
  if (!stays) setTimeout(() => shown.remove(), kind === 'error' ? 9000 : 3500);
  return shown;
}

const FIELDS = ':is(input, select, textarea, button):enabled:not([hidden])';

/**
 * A modal dialog with a title, with the focus on its first field or button. Resolves with what `finish(value)` is given,
 * or null when it is closed.
 */
export function dialog(title, build) {
  return new Promise((resolve) => {
    let result = null;
    const finish = (value) => {
      result = value;
      box.close();
    };
    const close = iconButton('close', 'Close', () => box.close());
    const heading = el('h2', { id: 'dialog-title' }, title);
    const box = el('dialog', { class: 'dialog', 'aria-labelledby': 'dialog-title' }, el('div', { class: 'dialog-head' }, heading, close));
    const content = [build(finish)].flat();
    box.append(...content);
    box.addEventListener('close', () => {
      box.remove();
      resolve(result);
    });
    box.addEventListener('mousedown', (event) => {
      if (event.target === box) box.close();
    });
    document.body.append(box);
    box.showModal();
    const first = box.querySelector('[autofocus]') ?? content.map((each) => each.querySelector(FIELDS)).find(Boolean);
    first?.focus();
  });
}

/** Asks before something that cannot be undone. */
export function confirmed(title, text, action) {
  return dialog(title, (finish) => [
    el('p', {}, text),
    el(
      'div',
      { class: 'dialog-actions' },
      el('button', { type: 'button', class: 'button', onclick: () => finish(false) }, 'Cancel'),
      el('button', { type: 'button', class: 'button danger', autofocus: true, onclick: () => finish(true) }, action),
    ),
  ]);
}
