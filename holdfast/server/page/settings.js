// What every new turn is asked with: for all chats, or for one of them. Presets are named settings. All are kept in the
// browser. A setting that is missing is the model's own.

const COMMON = 'holdfast.settings';
const CHATS = 'holdfast.chat-settings';
const PRESETS = 'holdfast.presets';
const PRESETS_FORMAT = 'holdfast.presets';
export const NO_ROOM = 'the browser keeps nothing for this page, or has no room';
const MOST_CHATS = 500; // chats whose own settings are kept; those that were set first are forgotten
export const MOST_PRESETS = 50;
export const MOST_NAME = 60; // characters of a preset's name
const MOST_STOPS = 16;
const MOST_STOP = 1024; // characters of a stop string
const MOST_INSTRUCTIONS = 100_000; // characters

/** The numbers. `above` is a limit that the value itself must not have. The limits are the server's. */
export const NUMBERS = {
  temperature: { label: 'Temperature', min: 0, max: 2, hint: '0: always the likeliest token.' },
  top_p: { label: 'Top p', above: 0, max: 1, hint: 'Draw from the likeliest tokens up to this share.' },
  top_k: { label: 'Top k', min: 0, max: 2 ** 24, whole: true, hint: 'Number of likeliest tokens to draw from. 0: all.' },
  min_p: { label: 'Min p', min: 0, max: 1, hint: 'Leave out tokens below this share of the likeliest.' },
  presence_penalty: { label: 'Presence penalty', min: -2, max: 2, hint: 'Above 0: fewer words again.' },
  frequency_penalty: { label: 'Frequency penalty', min: -2, max: 2, hint: 'Above 0: fewer, by how often.' },
  repetition_penalty: { label: 'Repetition penalty', above: 0, max: 100, hint: 'Above 1: fewer words again, also the prompt’s.' },
  seed: { label: 'Seed', min: 0, max: Number.MAX_SAFE_INTEGER, whole: true, hint: 'Equal seeds draw equal answers.' },
  max_output_tokens: { label: 'Most tokens', min: 1, max: 1_000_000, whole: true, hint: 'Of an answer. Empty: as many as fit.' },
};
export const THINKING = { none: 'Off', on: 'On', low: 'Low effort', medium: 'Medium effort', high: 'High effort' };
const NAMES = ['instructions', 'thinking', 'stop', ...Object.keys(NUMBERS)];

export const BUILT_IN = [
  { name: 'The model’s own', settings: {} },
  { name: 'Exact', settings: { temperature: 0 } },
  { name: 'Careful', settings: { temperature: 0.3, top_p: 0.9 } },
  { name: 'Lively', settings: { temperature: 1, min_p: 0.05 } },
];

/** The settings of a chat, or those for all chats if it has none of its own. */
export function of(chat) {
  return ownOf(chat) ?? valid(read(COMMON, {}));
}

/** A chat's own settings; null if it has none. */
export function ownOf(chat) {
  const own = chat === null ? undefined : chats().get(chat);
  return own === undefined ? null : valid(own);
}

/** Keep settings for all chats that have none of their own. Returns whether the browser could. */
export function keepForAll(settings) {
  return write(COMMON, settings);
}

/** Keep settings for one chat. null: it has none of its own any more. Returns whether the browser could. */
export function keepFor(chat, settings) {
  const all = chats();
  if (settings === null && !all.has(chat)) return true;
  all.delete(chat);
  if (settings !== null) all.set(chat, settings);
  return write(CHATS, Object.fromEntries([...all].slice(-MOST_CHATS)));
}

function chats() {
  return new Map(Object.entries(read(CHATS, {})));
}

/** The user's own presets: a list of {name, settings}. */
export function presets() {
  const found = read(PRESETS, []);
  return Array.isArray(found) ? found.filter(isPreset).slice(0, MOST_PRESETS) : [];
}

/** Keep the user's own presets. Returns whether the browser could. */
export function keepPresets(list) {
  return write(PRESETS, list);
}

function isPreset(preset) {
  return typeof preset?.name === 'string' && isObject(preset.settings) && nameFault(preset.name) === null && faults(preset.settings).size === 0;
}

/** What is wrong with a preset's name; null if nothing is. */
export function nameFault(name) {
  if (!name.trim()) return 'A preset needs a name';
  if (name.length > MOST_NAME) return `The name has ${name.length} characters; at most ${MOST_NAME} are allowed`;
  if (BUILT_IN.some((each) => each.name === name)) return `“${name}” is built in; take another name`;
  return null;
}

/** The text of a file with presets. */
export function presetsFile() {
  return JSON.stringify({ format: PRESETS_FORMAT, version: 1, presets: presets() }, null, 1);
}

/** Take in a file with presets. One of the same name is replaced. Returns their number. Throws an Error that says why not. */
export function takePresets(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error('it is not JSON');
  }
  if (file?.format !== PRESETS_FORMAT || file.version !== 1 || !Array.isArray(file.presets)) throw new Error('it has no presets that were exported here');
  for (const preset of file.presets) {
    if (typeof preset?.name !== 'string' || !isObject(preset.settings)) throw new Error('one of its presets has no name or no settings');
    const fault = nameFault(preset.name) ?? [...faults(preset.settings).values()][0];
    if (fault) throw new Error(`“${preset.name.slice(0, MOST_NAME)}”: ${fault}`);
  }
  const taken = new Map(presets().map((each) => [each.name, each]));
  for (const { name, settings } of file.presets) taken.set(name, { name, settings: known(settings) });
  if (taken.size > MOST_PRESETS) throw new Error(`there would be ${taken.size} presets; at most ${MOST_PRESETS} are kept`);
  if (!keepPresets([...taken.values()])) throw new Error(NO_ROOM);
  return file.presets.length;
}

/** The settings of a preset among these, without the model. */
export function known(settings) {
  return Object.fromEntries(NAMES.filter((name) => isSet(settings[name])).map((name) => [name, settings[name]]));
}

/** The preset with just these settings; null if there is none. One without instructions leaves them as they are. */
export function presetOf(settings) {
  const { instructions, ...rest } = known(settings);
  const same = (preset) => {
    const { instructions: other, ...values } = known(preset.settings);
    return (other === undefined || other === instructions) && canonical(values) === canonical(rest);
  };
  return presets().find(same) ?? BUILT_IN.find(same) ?? null;
}

const canonical = (values) => JSON.stringify(Object.entries(values).sort(([a], [b]) => (a < b ? -1 : 1)));
const isObject = (value) => typeof value === 'object' && value !== null && !Array.isArray(value);
const isSet = (value) => value !== undefined && value !== null && value !== '' && !(Array.isArray(value) && value.length === 0);

/** Settings without values that the server would refuse, for what an older page or another hand wrote. */
export function valid(settings) {
  if (!isObject(settings)) return {};
  const wrong = faults(settings);
  const kept = Object.fromEntries(Object.entries(known(settings)).filter(([name]) => !wrong.has(name)));
  return typeof settings.model === 'string' ? { ...kept, model: settings.model } : kept;
}

/** What is wrong with settings: a Map from names to sentences that name the value and its limit. */
export function faults(settings) {
  const found = new Map();
  for (const [name, limits] of Object.entries(NUMBERS)) {
    const fault = isSet(settings[name]) ? numberFault(settings[name], limits) : null;
    if (fault) found.set(name, fault);
  }
  const { stop, thinking, instructions } = settings;
  if (isSet(stop)) {
    if (!Array.isArray(stop) || !stop.every((each) => typeof each === 'string' && each)) found.set('stop', 'Stop strings must be texts');
    else if (stop.length > MOST_STOPS) found.set('stop', `There are ${stop.length} stop strings; at most ${MOST_STOPS} are allowed`);
    else if (stop.some((each) => each.length > MOST_STOP)) found.set('stop', `A stop string has ${Math.max(...stop.map((each) => each.length))} characters; at most ${MOST_STOP} are allowed`);
  }
  if (isSet(thinking) && !Object.hasOwn(THINKING, thinking)) found.set('thinking', `Thinking must be one of ${Object.keys(THINKING).join(', ')}`);
  if (isSet(instructions) && (typeof instructions !== 'string' || instructions.length > MOST_INSTRUCTIONS)) {
    found.set('instructions', `The instructions have ${String(instructions).length} characters; at most ${MOST_INSTRUCTIONS} are allowed`);
  }
  return found;
}

function numberFault(value, { label, min, above, max, whole }) {
  if (typeof value !== 'number' || !Number.isFinite(value)) return `${label} must be a number`;
  const range = above === undefined ? `between ${min} and ${max}` : `above ${above} and at most ${max}`;
  if ((above !== undefined && value <= above) || value < min || value > max) return `${label} is ${value}; it must be ${range}`;
  if (whole && !Number.isInteger(value)) return `${label} is ${value}; it must be a whole number`;
  return null;
}

/** The fields of a request that the settings ask for. */
export function asFields(settings, models) {
  const fields = { model: models.includes(settings.model) ? settings.model : models[0] };
  if (settings.instructions?.trim()) fields.instructions = settings.instructions;
  for (const name of Object.keys(NUMBERS)) if (typeof settings[name] === 'number') fields[name] = settings[name];
  if (settings.stop?.length) fields.stop = settings.stop;
  if (settings.thinking === 'on') fields.chat_template_kwargs = { enable_thinking: true };
  else if (settings.thinking) fields.reasoning = { effort: settings.thinking };
  return fields;
}

function read(name, otherwise) {
  try {
    const found = JSON.parse(localStorage.getItem(name));
    return typeof found === 'object' && found !== null ? found : otherwise;
  } catch {
    return otherwise;
  }
}

/** Returns whether the value is kept. If the browser forbids it, or has no room, settings last as long as the page. */
function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
