// The dialog in which the settings and the presets are changed.

import { dialog, download, el, iconButton, toast } from './dom.js';
import { BUILT_IN, MOST_NAME, MOST_PRESETS, NO_ROOM, NUMBERS, THINKING, faults, keepPresets, known, nameFault, presetOf, presets, presetsFile, takePresets } from './settings.js';

const MOST_FILE_BYTES = 8 * 1024 * 1024; // of a file with presets
const ESCAPES = { n: '\n', t: '\t', '\\': '\\' };

/** Which ways of thinking a model's chat template knows: names of THINKING. None if it does not say. */
async function waysOf(api, model) {
  try {
    const { template } = await api.post('/api/show', { model });
    const ways = template.includes('enable_thinking') ? ['none', 'on'] : [];
    return template.includes('reasoning_effort') ? [...ways, 'low', 'medium', 'high'] : ways;
  } catch {
    return [];
  }
}

/**
 * Let the user change the settings. `own`: whether the shown ones are the chat's own. Resolves with {settings, own}, where
 * own says whether they are for this chat only, or with null.
 */
export function editSettings({ api, settings, own, models }) {
  return dialog('Settings', (finish) => new Form(api, settings, own, models, finish).element);
}

class Form {
  constructor(api, settings, own, models, finish) {
    this.api = api;
    this.finish = finish;
    this.shown = []; // names with a fault that is shown
    this.model = el('select', { id: 'set-model', onchange: () => this.drawWays() }, models.map((id) => el('option', { value: id, selected: id === settings.model }, id)));
    this.instructions = el('textarea', { id: 'set-instructions', rows: 3, placeholder: 'What the model should know or be' });
    this.thinking = el('select', { id: 'set-thinking' });
    this.ways = el('div', { class: 'field-box', hidden: true }, el('label', { for: 'set-thinking' }, 'Thinking'), this.thinking);
    this.stop = el('textarea', { id: 'set-stop', rows: 2, class: 'mono', spellcheck: 'false', 'aria-describedby': 'hint-stop fault-stop' });
    this.inputs = Object.fromEntries(Object.entries(NUMBERS).map(([name, { min, above, max, whole }]) => [name, el('input', {
      type: 'number', id: `set-${name}`, inputmode: whole ? 'numeric' : 'decimal', min: min ?? above, max, step: whole ? 1 : 'any', placeholder: max > 100 ? '' : `${min ?? above} to ${max}`, 'aria-describedby': `hint-${name} fault-${name}`,
    })]));
    this.preset = el('select', { id: 'set-preset', onchange: () => this.choosePreset() });
    this.name = el('input', { id: 'preset-name', maxlength: MOST_NAME, placeholder: 'Name of the preset', 'aria-label': 'Name of the preset', 'aria-describedby': 'fault-preset', onkeydown: (event) => this.nameKey(event) });
    this.naming = el('div', { class: 'preset-row', hidden: true }, this.name,
      el('button', { type: 'button', class: 'button', onclick: () => this.named() }, 'Keep'));
    this.renameButton = iconButton('edit', 'Rename this preset', () => this.askName(this.preset.value));
    this.deleteButton = iconButton('trash', 'Delete this preset', () => this.deletePreset());
    this.file = el('input', { type: 'file', accept: '.json,application/json', hidden: true, onchange: () => this.importPresets() });
    this.scope = ['all', 'chat'].map((value) => el('input', { type: 'radio', name: 'scope', id: `scope-${value}`, value, checked: own === (value === 'chat') }));
    this.element = this.build();
    this.fill(settings);
    this.listPresets();
    this.drawWays();
  }

  build() {
    const number = ([name, { label, hint }]) => el('div', { class: 'field-box' }, el('label', { for: `set-${name}` }, label), this.inputs[name],
      el('span', { class: 'hint', id: `hint-${name}` }, hint), fault(name));
    return el('form', { class: 'form settings', novalidate: true, onsubmit: (event) => this.submit(event), oninput: (event) => this.changed(event) },
      el('label', { for: 'set-preset' }, 'Preset'),
      el('div', { class: 'preset-row' }, this.preset,
        iconButton('plus', 'Keep these settings as a preset', () => this.askName('')), this.renameButton, this.deleteButton,
        iconButton('export', 'Export the presets', () => this.exportPresets()), iconButton('import', 'Import presets', () => this.file.click()), this.file),
      this.naming, fault('preset'),
      el('label', { for: 'set-model' }, 'Model'), this.model,
      el('label', { for: 'set-instructions' }, 'Instructions'), this.instructions, fault('instructions'),
      this.ways,
      el('div', { class: 'fields' }, Object.entries(NUMBERS).map(number)),
      el('label', { for: 'set-stop' }, 'Stop strings'), this.stop,
      el('span', { class: 'hint', id: 'hint-stop' }, 'One a line. The answer ends before the first of them. \\n is a new line, \\\\ a backslash.'), fault('stop'),
      el('fieldset', { class: 'scope' }, el('legend', {}, 'For'),
        el('label', { class: 'check' }, this.scope[0], 'all chats without settings of their own'),
        el('label', { class: 'check' }, this.scope[1], 'this chat only')),
      el('div', { class: 'dialog-actions' }, el('button', { type: 'submit', class: 'button primary' }, 'Save')));
  }

  /** Show settings. */
  fill(settings) {
    this.instructions.value = settings.instructions ?? '';
    for (const [name, input] of Object.entries(this.inputs)) input.value = settings[name] ?? '';
    this.stop.value = (settings.stop ?? []).map((each) => each.replace(/[\\\n\t]/g, (sign) => ({ '\n': '\\n', '\t': '\\t' })[sign] ?? '\\\\')).join('\n');
    this.drawThinking(settings.thinking ?? '');
  }

  /** What the fields hold. A number that cannot be read is NaN, which `faults` reports. */
  read() {
    const found = { model: this.model.value };
    if (this.instructions.value.trim()) found.instructions = this.instructions.value;
    if (this.thinking.value) found.thinking = this.thinking.value;
    for (const [name, input] of Object.entries(this.inputs)) if (input.value !== '' || input.validity.badInput) found[name] = input.valueAsNumber;
    const stop = this.stop.value.split('\n').filter((line) => line !== '').map((line) => line.replace(/\\([nt\\])/g, (_, sign) => ESCAPES[sign]));
    if (stop.length) found.stop = stop;
    return found;
  }

  /** Offer the ways of thinking that the chosen model knows. */
  async drawWays() {
    const model = this.model.value;
    const ways = await waysOf(this.api, model);
    if (model !== this.model.value) return;
    this.known = ways;
    this.drawThinking(this.thinking.value);
  }

  drawThinking(chosen) {
    const ways = [...new Set([...(this.known ?? []), chosen].filter(Boolean))];
    this.thinking.replaceChildren(...['', ...ways].map((way) => el('option', { value: way, selected: way === chosen }, THINKING[way] ?? 'The model’s own')));
    this.ways.hidden = ways.length === 0;
  }

  // ----- presets

  listPresets() {
    const option = ({ name }) => el('option', { value: name }, name);
    const own = presets();
    this.preset.replaceChildren(el('option', { value: '' }, 'No preset'), ...BUILT_IN.map(option), own.length ? el('optgroup', { label: 'Your presets' }, own.map(option)) : '');
    this.drawPreset();
  }

  /** Select the preset that the fields agree with. */
  drawPreset() {
    const settings = this.read();
    this.preset.value = (faults(settings).size === 0 && presetOf(settings)?.name) || '';
    const own = presets().some(({ name }) => name === this.preset.value);
    this.renameButton.disabled = this.deleteButton.disabled = !own;
  }

  choosePreset() {
    const chosen = [...presets(), ...BUILT_IN].find(({ name }) => name === this.preset.value);
    if (chosen) this.fill({ ...chosen.settings, instructions: chosen.settings.instructions ?? this.instructions.value });
    this.drawPreset();
    this.clear();
  }

  /** Ask for a preset's name: of a new one, or of the one that is renamed. */
  askName(renamed) {
    this.renamed = renamed;
    this.naming.hidden = false;
    this.name.value = renamed;
    this.name.focus();
    this.name.select();
  }

  nameKey(event) {
    if (event.key === 'Enter') {
      event.preventDefault();
      this.named();
    } else if (event.key === 'Escape') {
      event.preventDefault();
      this.naming.hidden = true;
      this.preset.focus();
    }
  }

  named() {
    const name = this.name.value.trim();
    const list = presets();
    const taken = list.find((each) => each.name === name);
    const settings = this.renamed ? list.find((each) => each.name === this.renamed).settings : known(this.read());
    const wrong = nameFault(name)
      ?? (this.renamed && taken && name !== this.renamed ? `There is a preset “${name}”; take another name` : null)
      ?? [...faults(settings).values()][0]
      ?? (!taken && !this.renamed && list.length >= MOST_PRESETS ? `There are ${list.length} presets; at most ${MOST_PRESETS} are kept` : null);
    this.say('preset', wrong ?? '', this.name);
    if (wrong) return;
    const gone = this.renamed || name;
    const kept = list.some((each) => each.name === gone) ? list.map((each) => (each.name === gone ? { name, settings } : each)) : [...list, { name, settings }];
    if (!keepPresets(kept)) {
      this.say('preset', `“${name}” was not kept: ${NO_ROOM}`, this.name);
      return;
    }
    this.naming.hidden = true;
    this.listPresets();
    this.preset.value = name;
    this.preset.focus();
  }

  deletePreset() {
    keepPresets(presets().filter(({ name }) => name !== this.preset.value));
    this.listPresets();
    this.preset.focus();
  }

  exportPresets() {
    download('presets.json', presetsFile(), 'application/json');
  }

  async importPresets() {
    const [file] = this.file.files;
    this.file.value = '';
    if (!file) return;
    try {
      if (file.size > MOST_FILE_BYTES) throw new Error(`it has ${file.size.toLocaleString('en')} bytes; at most ${MOST_FILE_BYTES.toLocaleString('en')} are read`);
      const count = takePresets(await file.text());
      this.say('preset', '');
      this.listPresets();
      toast(count === 1 ? 'Imported a preset' : `Imported ${count} presets`);
    } catch (error) {
      this.say('preset', `“${file.name}” cannot be imported: ${error.message}`);
    }
  }

  // ----- faults

  changed(event) {
    if (event.target === this.name || event.target === this.preset) return;
    this.drawPreset();
    if (this.shown.length) this.check();
  }

  /** Say what is wrong with a field; an empty text takes that back. */
  say(name, text, input = this.inputs[name] ?? this[name]) {
    this.element.querySelector(`#fault-${name}`).textContent = text;
    if (text) input?.setAttribute('aria-invalid', 'true');
    else input?.removeAttribute('aria-invalid');
  }

  clear() {
    for (const name of this.shown) this.say(name, '');
    this.shown = [];
  }

  /** Show the faults. Returns the settings, or null if there is a fault. */
  check() {
    const settings = this.read();
    const found = faults(settings);
    this.clear();
    for (const [name, text] of found) this.say(name, text);
    this.shown = [...found.keys()];
    return found.size ? null : settings;
  }

  submit(event) {
    event.preventDefault();
    const settings = this.check();
    if (settings) this.finish({ settings, own: this.scope[1].checked });
    else (this.inputs[this.shown[0]] ?? this[this.shown[0]]).focus();
  }
}

/** The place in which a field's fault is shown. */
function fault(name) {
  return el('span', { class: 'error fault', id: `fault-${name}`, role: 'alert' });
}
