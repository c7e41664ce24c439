// The GPUs, under their hosts where there are several.

function show_gpus() {
  const gpus = Object.entries(state.gpus);
  reveal($("gpus").closest("section"), state.hosts || gpus.length > 0);
  reveal($("gpus"), !state.hosts);
  reveal($("hosts"), state.hosts);
  if (state.hosts) show_hosts(gpus);
  else show_cards($("gpus"), gpus);
}

function show_cards(parent, gpus) {
  list(
    parent,
    gpus,
    ([id]) => id,
    begin_card,
    (card, [id, gpu]) => {
      const [top, holds, bar, memory, notes] = card.children;
      const [name, size, mark] = top.children;
      put(name, `GPU ${gpu.host ? id.slice(gpu.host.length + 1) : id}`);
      put(size, gpu.total ? gib(gpu.total) : "");
      if (gpu.host_lost) chip(mark, "bad", "out of service", "out of service");
      else chip(mark, gpu.state, gpu.state);
      show_holders(holds, gpu);
      show_memory(bar, memory, gpu);
      list(
        notes,
        notes_of_gpu(gpu),
        text => text,
        text => make("div", "note", text),
        () => {},
      );
    },
  );
}

function begin_card() {
  const top = make("div", "top", make("strong"), make("span", "soft small"), make("span", "chip"));
  const bar = make("div", "memory", make("i", "ours"), make("i", "others"));
  set(bar, "role", "img");
  const parts = ["ours", "others", "free"].map(part => make("span", "part " + part));
  for (const part of parts) explain(part, part.className.slice(5));
  return make("div", "", top, make("div", "holds"), bar, make("div", "note parts", ...parts), make("div"));
}

function show_holders(parent, gpu) {
  const begin = model => make("div", "", make("span", "swatch"), model, make("span", "soft small"));
  list(
    parent,
    gpu.residents,
    model => model,
    begin,
    (holder, model) => {
      set_style(holder.firstChild, "background", colour(model));
      // A model that is not configured any more may still be there.
      const backends = Object.keys(state.models[model]?.backends || {});
      const held = backends.map(name => gpu.users[name]).find(bytes => bytes);
      put(holder.lastChild, held ? gib(held) : "");
    },
  );
}

// The memory of a GPU, in a bar and in figures: what models of ours hold, what others hold, and what is free.
function show_memory(bar, figures, gpu) {
  const is_known = Boolean(gpu.total) && gpu.used !== null;
  reveal(bar, is_known);
  reveal(figures, is_known);
  if (!is_known) return;
  const ours = Math.min(gpu.used, held_by_ours(gpu));
  const parts = {ours, others: gpu.used - ours, free: Math.max(0, gpu.total - gpu.used)};
  const words = Object.entries(parts).map(([part, bytes]) => `${gib(bytes)} ${part}`);
  set(bar, "aria-label", `Memory: ${words.join(", ")}`);
  for (const each of bar.children) set_style(each, "width", percent(parts[each.className] / gpu.total));
  [...figures.children].forEach((figure, index) => {
    const [part, bytes] = Object.entries(parts)[index];
    put(figure, words[index]);
    reveal(figure, part === "free" || bytes > 0);
  });
}

// Some drivers do not tell who holds what: then all that nobody else holds is ours, if something of ours is
// there.
function held_by_ours({used, users, others, residuals}) {
  const sum = amounts => amounts.reduce((all, bytes) => all + (bytes || 0), 0);
  const held = Object.values(users || {});
  if (!held.length && !Object.keys(residuals || {}).length) return 0;
  return held.length && !held.includes(null)
    ? sum(held)
    : used - sum((others || []).map(other => other.bytes));
}

function notes_of_gpu({sensors, draining, reserved_for, residuals, others, missing}) {
  const {utilization = null, celsius = null, watts = null} = sensors || {};
  const measured = [];
  if (utilization !== null) measured.push(`${Math.round(100 * utilization)} % busy`);
  if (celsius !== null) measured.push(`${celsius} °C`);
  if (watts !== null) measured.push(`${watts} W`);
  const notes = measured.length ? [measured.join(", ")] : [];
  if (draining) notes.push(drain_words(draining));
  if (missing) notes.push(missing);
  if (reserved_for && reserved_for.length) notes.push(`reserved for ${reserved_for.join(" and ")}`);
  for (const [name, bytes] of Object.entries(residuals || {}))
    notes.push(`${name} is in standby and holds ${gib(bytes)}`);
  for (const {name, pid, bytes} of others || [])
    notes.push(
      `other process: ${name || "a program"} (process ${pid})${bytes ? " holds " + gib(bytes) : ""}`,
    );
  return notes;
}

function drain_words({target, leases, seconds_left}) {
  const end = seconds_left === null ? "for as long as it takes" : span(seconds_left) + " left";
  return `draining${target ? ` for ${target}` : ""}: ${still_run(leases)}, ${end}`;
}

// Hosts: ours is `local`, and is shown if it has GPUs. Of many, those that are not here come first, and the
// GPUs of the others are folded.

const MANY_HOSTS = 6;
const HOST_TERMS = {ready: "here", bad: "lost", loading: "away", drained: "drained"};
const unfolded = new Map(); // hosts whose GPUs were shown or hidden by hand

function show_hosts(gpus) {
  const held = gpus_by_host(gpus);
  const is_here = name => standing(name).kind === "ready";
  const later = name => held.size > MANY_HOSTS && is_here(name);
  const names = [...held.keys()].sort(
    (one, other) =>
      later(one) - later(other) || (other === "local") - (one === "local") || ORDER.compare(one, other),
  );
  put($("hosts-here"), `${names.filter(is_here).length} of ${several(names.length, "host")} here`);
  list(
    $("hosts"),
    names,
    name => name,
    begin_host,
    (made, name) => {
      show_host(made, name, held.get(name), held.size > MANY_HOSTS);
    },
  );
}

function gpus_by_host(gpus) {
  const held = new Map(Object.keys(state.hosts).map(name => [name, []]));
  for (const [id, gpu] of gpus) {
    const name = gpu.host || "local";
    if (!held.has(name)) held.set(name, []);
    held.get(name).push([id, gpu]);
  }
  return held;
}

function begin_host(name) {
  const fold = button("", () => {
    unfolded.set(name, fold.getAttribute("aria-expanded") !== "true");
    show_gpus();
  });
  const actions = action_buttons();
  actions.classList.add("act");
  const head = make(
    "div",
    "host",
    make("h3", "", name),
    make("span", "chip"),
    fold,
    actions,
    make("div", "note"),
  );
  return make("div", "", head, make("div", "gpus"));
}

function show_host(made, name, own, may_fold) {
  const [head, cards] = made.children;
  const [, mark, fold, actions, note] = head.children;
  const holds = own.some(([, gpu]) => gpu.residents.length);
  const {kind, word, about} = standing(name, holds);
  const is_open = unfolded.get(name) ?? (!may_fold || kind !== "ready");
  chip(mark, kind, word, HOST_TERMS[kind]);
  put_line(note, [about, is_open ? "" : count_states(own)].filter(text => text).join("; "));
  set(made, "class", is_open && own.length > 2 ? "wide" : null);
  put(fold, is_open ? "Hide" : several(own.length, "GPU"));
  set(fold, "aria-expanded", is_open);
  set(fold, "aria-label", `${is_open ? "Hide" : "Show"} the GPUs of ${name}`);
  reveal(fold, own.length && may_fold);
  show_actions(actions, `the host ${name}`, actions_of_host(name));
  show_cards(cards, is_open ? own : []);
}

function actions_of_host(name) {
  const host = state.hosts[name];
  if (!host) return [];
  const text = host.drained ? "Undrain" : "Drain";
  const drain = {text, label: `${text} the host ${name}`, act: () => drain_host(name), term: "drained"};
  const label = `Declare the host ${name} gone`;
  return host.lost
    ? [{text: "Declare gone", label, act: () => declare_gone(name), term: "gone"}, drain]
    : [drain];
}

function standing(name, holds) {
  const host = state.hosts[name];
  if (!host) return {kind: "ready", word: "here", about: "the machine that anvil-mux runs on"};
  const drained = host.drained ? ", drained" : "";
  if (host.lost) {
    const word = `lost for ${span(host.lost_seconds + now() - state.now)}${drained}`;
    const about = holds ? "what was loaded there may still run" : "nothing was loaded there";
    return {kind: "bad", word, about};
  }
  if (host.away) {
    const about = "its agent does not answer; requests go on, and nothing is loaded or evicted there";
    return {kind: "loading", word: "away" + drained, about};
  }
  if (!host.drained) return {kind: "ready", word: "here", about: ""};
  const emptied = "what is loaded there is unloaded once its requests have ended";
  return {kind: "drained", word: "drained", about: holds ? emptied : "nothing is loaded there"};
}

function count_states(gpus) {
  const counts = {};
  for (const [, gpu] of gpus) counts[gpu.state] = (counts[gpu.state] || 0) + 1;
  return Object.entries(counts)
    .map(([word, count]) => `${count} ${word}`)
    .join(", ");
}
