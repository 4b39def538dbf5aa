// The frame of the page: two tabs, the theme, the key. Each tab is a module with mount(element, api) and unmount().

import { Api } from './api.js';
import { dialog, el, icon, iconButton } from './dom.js';

const VIEWS = {
  chat: () => import('./chat.js'),
  engine: () => import('./engine.js'),
};
const THEMES = ['auto', 'light', 'dark'];
const THEME_ICONS = { auto: 'auto', light: 'sun', dark: 'moon' };

const api = new Api(askKey);
let shown = null;
let talk = '#chat'; // where the chat was left

/** Ask for the server's key. Resolves with {key, keep}, or null. */
function askKey(wrong) {
  return dialog('This server needs a key', (finish) => {
    const key = el('input', { type: 'password', id: 'key', autocomplete: 'off', spellcheck: 'false', required: true });
    const keep = el('input', { type: 'checkbox', id: 'keep-key' });
    const submit = (event) => {
      event.preventDefault();
      if (key.value.trim()) finish({ key: key.value.trim(), keep: keep.checked });
    };
    const text = wrong
      ? 'The key was not accepted. Enter another one.'
      : 'Enter an API key of this server. You see only the conversations of your key.';
    return el(
      'form',
      { onsubmit: submit, class: 'form' },
      el('p', { class: wrong ? 'error' : '' }, text),
      el('label', { for: 'key' }, 'API key'),
      key,
      el('label', { class: 'check' }, keep, ' Keep it in this browser. Otherwise it is forgotten with this tab.'),
      el('div', { class: 'dialog-actions' }, el('button', { type: 'submit', class: 'button primary' }, 'Use this key')),
    );
  });
}

/** Show one of the views, and end the other one. */
async function show(name) {
  if (shown?.name === name) return;
  const before = shown;
  shown = { name, module: null };
  const mine = shown;
  for (const each of Object.keys(VIEWS)) {
    const tab = document.getElementById(`tab-${each}`);
    tab.setAttribute('aria-selected', String(each === name));
    tab.tabIndex = each === name ? 0 : -1;
    document.getElementById(`view-${each}`).hidden = each !== name;
  }
  await before?.module?.unmount();
  if (before) document.getElementById(`view-${before.name}`).replaceChildren();
  const place = document.getElementById(`view-${name}`);
  try {
    const module = await VIEWS[name]();
    if (shown !== mine) return;
    mine.module = module;
    await module.mount(place, api);
  } catch (error) {
    if (mine.module !== null) throw error;
    if (shown === mine) place.replaceChildren(el('p', { class: 'error list-note' }, 'This view cannot be loaded. Is the server running? Reload the page to try again.'));
  }
}

/** The view that the address names: #engine, or #chat with a conversation behind it. */
function named() {
  return location.hash.startsWith('#engine') ? 'engine' : 'chat';
}

function themeButton() {
  let at = Math.max(0, THEMES.indexOf(document.documentElement.dataset.choice ?? 'auto'));
  const button = iconButton('auto', '', () => {
    at = (at + 1) % THEMES.length;
    const theme = THEMES[at];
    if (theme === 'auto') delete document.documentElement.dataset.choice;
    else document.documentElement.dataset.choice = theme;
    try {
      if (theme === 'auto') localStorage.removeItem('holdfast.theme');
      else localStorage.setItem('holdfast.theme', theme);
    } catch {}
    draw();
    document.dispatchEvent(new CustomEvent('themechoice'));
  });
  const draw = () => {
    const label = { auto: 'Theme: as the system', light: 'Theme: light', dark: 'Theme: dark' }[THEMES[at]];
    button.replaceChildren(icon(THEME_ICONS[THEMES[at]]));
    button.title = label;
    button.setAttribute('aria-label', label);
  };
  draw();
  return button;
}

function keyButton() {
  const button = iconButton('key', 'Forget the key', () => {
    api.setKey('');
    location.reload();
  });
  const draw = () => (button.hidden = !api.key);
  api.onKey.push(draw);
  draw();
  return button;
}

for (const name of Object.keys(VIEWS)) {
  const tab = document.getElementById(`tab-${name}`);
  tab.addEventListener('click', () => {
    if (named() === name) return;
    if (name === 'engine') talk = location.hash || '#chat';
    location.hash = name === 'chat' ? talk : '#engine';
  });
  tab.addEventListener('keydown', (event) => {
    if (event.key !== 'ArrowLeft' && event.key !== 'ArrowRight') return;
    const other = document.getElementById(`tab-${name === 'chat' ? 'engine' : 'chat'}`);
    other.focus();
    other.click();
  });
}
document.getElementById('bar-end').append(keyButton(), themeButton());
window.addEventListener('hashchange', () => {
  if (named() === 'chat') talk = location.hash;
  show(named());
});
show(named());
