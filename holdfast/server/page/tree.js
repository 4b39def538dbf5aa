// A conversation as a tree of turns: pure functions and one class, without the document and the network.

/** The text of a message item. */
export function textOf(item) {
  return (item.content ?? []).map((part) => part.text ?? '').join('\n');
}

/** What was asked in a turn, for comparing and for titles. */
export function asked(turn) {
  return (turn.input ?? []).map((item) => (item.type === 'message' ? textOf(item) : (item.output ?? item.arguments ?? ''))).join('\n');
}

/** Whether a turn can follow this one. */
export function goesOn(turn) {
  return turn.status === 'completed' || turn.status === 'incomplete' || (turn.status === 'cancelled' && (turn.output ?? []).length > 0);
}

export function isRunning(turn) {
  return turn.status === 'queued' || turn.status === 'in_progress';
}

/** Kinds of items of an answer that the next turn answers, with the kind of their answer. */
export const ANSWERS = { function_call: 'function_call_output', custom_tool_call: 'custom_tool_call_output', mcp_approval_request: 'mcp_approval_response' };

/** What an item and its answer have in common. */
function keyOf(item) {
  return item.call_id ?? item.approval_request_id ?? item.id;
}

/** Whether the server has not taken this turn yet. */
export function isNew(turn) {
  return turn.id.startsWith('new');
}

/** The turns of a conversation. The oldest of siblings comes first. */
export class Tree {
  constructor(turns = [], head = null) {
    this.turns = new Map();
    this.children = new Map([[null, []]]);
    this.head = head; // the turn that the server would go on from
    this.chosen = new Map(); // by parent, the child that was shown last
    for (const turn of turns) this.add(turn);
  }

  add(turn) {
    const parent = this.turns.has(turn.parent) ? turn.parent : null;
    turn.parent = parent;
    this.turns.set(turn.id, turn);
    this.children.set(turn.id, this.children.get(turn.id) ?? []);
    this.children.get(parent).push(turn.id);
    this.choose(turn.id);
  }

  get(id) {
    return this.turns.get(id) ?? null;
  }

  /** Give a turn another id. */
  rename(turn, id) {
    const before = turn.id;
    turn.id = id;
    this.turns.delete(before);
    this.turns.set(id, turn);
    this.children.set(id, this.children.get(before));
    this.children.delete(before);
    const beside = this.children.get(turn.parent);
    beside[beside.indexOf(before)] = id;
    if (this.chosen.get(turn.parent) === before) this.chosen.set(turn.parent, id);
  }

  /** Take a turn away that nothing follows. */
  remove(turn) {
    this.turns.delete(turn.id);
    this.children.delete(turn.id);
    const beside = this.children.get(turn.parent);
    beside.splice(beside.indexOf(turn.id), 1);
    if (this.chosen.get(turn.parent) === turn.id) this.chosen.delete(turn.parent);
  }

  /** Show this turn wherever its ancestors have others to show. */
  choose(id) {
    for (let turn = this.get(id); turn; turn = this.get(turn.parent)) this.chosen.set(turn.parent, turn.id);
  }

  /** The turns from the first one down to `leaf`. */
  path(leaf) {
    const found = [];
    for (let turn = this.get(leaf); turn; turn = this.get(turn.parent)) found.push(turn);
    return found.reverse();
  }

  /** The last turn of the branch that was shown last below a turn; of the whole tree for null. */
  leafBelow(id) {
    let at = id;
    while ((this.children.get(at) ?? []).length > 0) at = this.chosen.get(at) ?? this.children.get(at).at(-1);
    return at;
  }

  /** The siblings of a turn, itself among them. */
  siblings(turn) {
    return this.children.get(turn.parent).map((id) => this.get(id));
  }

  /** Versions of what was asked: of each, its latest turn. */
  questions(turn) {
    const latest = new Map();
    for (const each of this.siblings(turn)) latest.set(asked(each), each);
    latest.set(asked(turn), turn);
    return [...latest.values()];
  }

  /** The answers to the same question. */
  answers(turn) {
    return this.siblings(turn).filter((each) => asked(each) === asked(turn));
  }

  /** The calls of a turn, and what it asks approval for, that no turn below it answers. */
  openCalls(turn) {
    if (turn.status !== 'completed') return [];
    const below = (this.children.get(turn.id) ?? []).flatMap((id) => this.get(id).input ?? []);
    const answered = new Set(below.filter((item) => Object.values(ANSWERS).includes(item.type)).map(keyOf));
    return (turn.output ?? []).filter((item) => item.type in ANSWERS && !answered.has(keyOf(item)));
  }

  /** The name of the tool whose call an item answers, above a turn or in it; empty if it is not known. */
  called(turn, answer) {
    for (let at = turn; at; at = this.get(at.parent)) {
      const call = [...(at.history ?? []), ...(at.input ?? []), ...(at.output ?? [])].find((item) => ANSWERS[item.type] === answer.type && keyOf(item) === keyOf(answer));
      if (call) return call.name;
    }
    return '';
  }

  /** The answers that were asked for side by side with this one, of each column the latest; empty for other turns. */
  group(turn) {
    const id = turn?.metadata?.compare;
    if (!id) return [];
    const columns = new Map();
    for (const each of this.siblings(turn)) if (each.metadata?.compare === id) columns.set(Number(each.metadata.column), each);
    return [...columns].sort(([one], [other]) => one - other).map(([, each]) => each);
  }

  /** The last turn at or above this one that another turn can follow. */
  base(id) {
    let turn = this.get(id);
    while (turn && !goesOn(turn)) turn = this.get(turn.parent);
    return turn;
  }
}
