// What every new turn is asked with. Kept in the browser.

import { dialog, el } from './dom.js';

const STORED = 'holdfast.settings';
const NUMBERS = {
  temperature: { label: 'Temperature', min: 0, max: 2, step: 0.05, hint: "0 always takes the likeliest token. Empty: the model's own." },
  top_p: { label: 'Top p', min: 0.01, max: 1, step: 0.01, hint: 'Draw only from the likeliest tokens that have this share of the probability.' },
  max_output_tokens: { label: 'Most tokens of an answer', min: 1, max: 1_000_000, step: 1, hint: 'Empty: as many as fit the context.' },
};

export function load() {
  try {
    const found = JSON.parse(localStorage.getItem(STORED) ?? '{}');
    return typeof found === 'object' && found !== null ? found : {};
  } catch {
    return {};
  }
}

function save(settings) {
  try {
    localStorage.setItem(STORED, JSON.stringify(settings));
  } catch {}
}

/** The fields of a request that the settings ask for. */
export function asFields(settings, models) {
  const fields = { model: models.includes(settings.model) ? settings.model : models[0] };
  if (settings.instructions?.trim()) fields.instructions = settings.instructions;
  for (const name of Object.keys(NUMBERS)) if (typeof settings[name] === 'number') fields[name] = settings[name];
  return fields;
}

/** Let the user change the settings. Resolves with the new ones, or null. */
export function edit(settings, models) {
  return dialog('Settings', (finish) => {
    const model = el('select', { id: 'set-model' }, models.map((id) => el('option', { value: id, selected: id === settings.model }, id)));
    const instructions = el('textarea', { id: 'set-instructions', rows: 4, placeholder: 'What the model should know or be', value: settings.instructions ?? '' });
    const inputs = {};
    const fields = Object.entries(NUMBERS).map(([name, { label, hint, ...limits }]) => {
      inputs[name] = el('input', { type: 'number', id: `set-${name}`, inputmode: 'decimal', value: settings[name] ?? '', 'aria-describedby': `hint-${name}`, ...limits });
      return [el('label', { for: `set-${name}` }, label), inputs[name], el('span', { class: 'hint', id: `hint-${name}` }, hint)];
    });
    const submit = (event) => {
      event.preventDefault();
      const chosen = { model: model.value, instructions: instructions.value };
      for (const [name, input] of Object.entries(inputs)) if (input.value !== '') chosen[name] = input.valueAsNumber;
      save(chosen);
      finish(chosen);
    };
    return el(
      'form',
      { class: 'form', onsubmit: submit },
      el('label', { for: 'set-model' }, 'Model'),
      model,
      el('label', { for: 'set-instructions' }, 'Instructions'),
      instructions,
      fields,
      el('div', { class: 'dialog-actions' }, el('button', { type: 'submit', class: 'button primary' }, 'Save')),
    );
  });
}
