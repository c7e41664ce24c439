// The state now: how anvil-mux is, its models, and who waits for them. Its GPUs are in gpus.js.

let state = null;
const whys = {}; // model -> the sentence that is shown of it
const load_begun = new Set(); // models of which nobody has heard yet that they load
const colour = model => `var(--c${Math.max(0, state.registry.indexOf(model)) % 8})`;

function show() {
  if (!state) return;
  show_health();
  show_key();
  show_gpus();
  show_models();
  show_queued();
  show_time();
  show_try();
  show_log_state();
}

function show_health() {
  const reload = state.reload || {problems: []};
  const refused = reload.problems[0];
  const problems = Object.entries(state.problems).map(([name, why]) => `${name}: ${why}`);
  const {paused} = state;
  const lost = hosts_not_here();
  if (problems.length) health("bad", problems.join("; "));
  else if (paused) health("drained", pause_words(paused), "paused");
  else if (lost) health("loading", lost);
  else if (refused) health("loading", `last reload refused: ${refused}`);
  else health("ready", "all is well");
  put($("pause"), paused ? "Resume" : "Pause");
  reveal($("lasts"), !paused);
  put($("load"), `${state.leases} in flight, ${state.waiting} waiting`);
  put($("version"), `anvil-mux ${state.version}` + (reload.at ? `, reloaded at ${clock(reload.at)}` : ""));
  const ready = Object.entries(state.models).filter(
    ([, model]) => model.state === "ready" && !model.host_lost,
  );
  document.title = (ready.map(([name]) => name).join(", ") || "no model") + " · anvil-mux";
}

function health(kind, text, term = "") {
  chip($("health"), kind, text, term);
}

function pause_words({until, requests}) {
  const end = until ? clock(until, MINUTE) : "resumed";
  const fate = requests === "wait" ? "wait" : "are refused";
  return `paused until ${end}: nothing is loaded, and requests ${fate}`;
}

function hosts_not_here() {
  const hosts = Object.entries(state.hosts || {});
  const lost = hosts.filter(([, host]) => host.lost).map(([name]) => `the host ${name} is lost`);
  const away = hosts
    .filter(([, host]) => host.away && !host.lost)
    .map(([name]) => `the host ${name} is away`);
  return first_of([...lost, ...away], 3);
}

// Models: a row of figures each, and below it a row as wide as the table for what needs words

function show_models() {
  const choices = Object.entries(state.any_of || {}).map(([name, {words}]) => `${name}: ${words}`);
  put_line($("choices"), choices.join(". "));
  const rows = [];
  for (const [name, model] of Object.entries(state.models)) {
    const notes = notes_of_model(name, model);
    rows.push({name, model});
    if (notes.length) rows.push({name, notes});
  }
  const key_of = ({name, notes}) => (notes ? name + "\n" : name); // no name has a line end
  list($("models"), rows, key_of, begin_model_row, (made, {name, model, notes}) => {
    if (notes) show_notes(made.firstChild, notes);
    else show_model(made, name, model);
  });
}

function begin_model_row({name, notes}) {
  if (notes) {
    const wide = make("td", "wide");
    wide.colSpan = 7;
    return make("tr", "notes", wide);
  }
  const figures = [
    ["number", "In flight"],
    ["number", "Waiting"],
    ["number", "Last load"],
  ];
  const made = row(["wide"], ["", "State"], [""], ...figures, ["wide"]);
  const [title, about_state, , , , , actions] = made.children;
  const swatch = make("span", "swatch");
  swatch.style.background = colour(name);
  const pinned = make("span", "tag", "pinned");
  explain(pinned, "pinned");
  title.append(make("span", "name", swatch, name), pinned);
  about_state.append(make("span", "chip"), make("div", "bar", make("i")), make("div", "note"));
  actions.append(action_buttons());
  return made;
}

function show_model(made, name, model) {
  const [title, about_state, gpus, leases, waiting, seconds, actions] = made.children;
  reveal(title.lastChild, model.pinned);
  show_state(about_state, model);
  put(gpus, places_of(model));
  set(gpus, "class", model.elsewhere || !is_placed(model) ? "soft" : null);
  put(leases, model.leases);
  put(waiting, model.waiting + (model.max_queue ? ` of ${model.max_queue}` : ""));
  put(seconds, span(model.load_seconds));
  show_actions(actions.firstChild, name, actions_of_model(name, model));
}

function show_notes(parent, notes) {
  const begin = ([kind]) => make("div", kind === "error" ? "error" : "note");
  list(
    parent,
    notes,
    ([kind]) => kind,
    begin,
    (made, [, text]) => put(made, text),
  );
}

function show_state(cell, model) {
  const [mark, bar, note] = cell.children;
  const {elsewhere, progress} = model;
  if (is_cut(model)) chip(mark, "bad", `circuit ${elsewhere.circuit.replace("_", "-")}`, "circuit");
  else if (elsewhere) chip(mark, model.state, "elsewhere", "elsewhere");
  else if (model.host_lost) chip(mark, "bad", model.state + ", host lost", "lost");
  else chip(mark, model.state, model.state);
  reveal(bar, progress);
  if (progress) set_style(bar.firstChild, "width", percent(progress.fraction || 0));
  put_line(note, progress ? progress.words : stay_words(model));
}

// How long a model stays in its state, or how deep it rests.
function stay_words(model) {
  const [answer] = (model.draining && model.draining.answers) || [];
  const passed = now() - state.now;
  if (answer) return `request ${answer.request} has run for ${span(answer.run_seconds + passed)}`;
  if (typeof model.home_seconds === "number")
    return `comes back in ${span(Math.max(0, model.home_seconds - passed))}`;
  const loaded = loaded_backends(model);
  return loaded.length === 1 && loaded[0][1].standby_level ? `level: ${loaded[0][1].standby_level}` : "";
}

const is_cut = ({elsewhere}) => Boolean(elsewhere) && elsewhere.circuit !== "closed";

// The backends of a model that are shown: all, or where there are many those that are not stopped.
function loaded_backends({candidates, backends}) {
  return Object.entries(backends).filter(([, each]) => !candidates || each.state !== "stopped");
}

function notes_of_model(name, model) {
  const {candidates, backends, fallback, presets = []} = model;
  const loaded = loaded_backends(model);
  const replicas = loaded.length > 1 ? loaded.map(replica_words) : [];
  const declare = backends[model.backend].vram_to_declare;
  const kept = loaded
    .concat(Object.entries(backends))
    .map(([, each]) => each.kept_prompts)
    .find(each => each);
  const notes = {
    error: is_cut(model) ? model.elsewhere.why : (model.last_error || "").split("\n")[0],
    why: whys[name],
    replicas: candidates ? first_of(replicas) : replicas.join(", "),
    fallback: fallback && fallback_words(fallback),
    declare: declare && `declare vram: ${declare}, and others may be loaded beside it`,
    presets: presets.length && `presets: ${first_of(presets)}`,
    kept:
      kept &&
      `prompts on disk: ${kept.prompts} (${kept.tokens} tokens, ${(kept.size / 2 ** 20).toFixed(1)} MiB)`,
  };
  return Object.entries(notes).filter(([, text]) => text);
}

function replica_words([name, {state, standby_level, host_lost}]) {
  return `${name}: ${state}${standby_level ? ` (${standby_level})` : ""}${host_lost ? ", host lost" : ""}`;
}

function fallback_words({models, after}) {
  return `fallback: ${models.join(", ")}${after === null ? "" : ` after ${span(after)}`}`;
}

// The GPUs that a model is on, or the hosts where it needs none; else where it may be loaded.
function places_of(model) {
  if (model.elsewhere) return model.elsewhere.server;
  const {candidates, backends, backend} = model;
  const size = backends[backend].size;
  const places = places_taken(model);
  const words = candidates ? first_of(places) || anywhere(model) : places.join(", ");
  return words + (size ? ` (${gib(size).replace(" ", "\u00a0")})` : "");
}

function places_taken(model) {
  const loaded = loaded_backends(model).map(([, each]) => each);
  const there = model.candidates && !model.host_lost ? loaded.filter(each => !each.host_lost) : loaded;
  const hosts = model.candidates
    ? there.filter(each => !each.gpus.length).map(each => each.host || "local")
    : [];
  return [...gpu_names(there.flatMap(each => each.gpus)), ...new Set(hosts)];
}

// GPUs of this machine are told together, those of other hosts as HOST/GPU.
function gpu_names(ids) {
  const found = [...new Set(ids)];
  const own = found.filter(id => !id.includes("/"));
  const others = found.filter(id => id.includes("/"));
  return own.length ? [`GPU ${own.join(", ")}`, ...others] : others;
}

function is_placed(model) {
  return !model.candidates || places_taken(model).length > 0;
}

function anywhere({candidates, backends, backend}) {
  const {gpus, host} = backends[backend];
  if (candidates.backends === 1) return gpu_names(gpus).join(", ") || host || "local";
  if (candidates.hosts > 1) return `any of ${candidates.hosts} hosts`;
  return `any of ${candidates.backends}` + (host ? ` on ${host}` : "");
}

function actions_of_model(name, model) {
  const action = (text, act, term, is_off = false) => {
    return {text, label: `${text} ${name}`, act: () => act(name), term, is_off};
  };
  const ask_why = action("Why", why, "wait estimate");
  const pages = state.pages.includes(name) && may_open(name) ? [engine_page(name)] : [];
  if (is_reader() || model.elsewhere) return [ask_why, ...pages];
  const pin_it = action(model.pinned ? "Unpin" : "Pin", pin, "pinned");
  const read_log = action("Log", open_log, "log");
  if (model.host_lost) return [ask_why, pin_it, read_log];
  const unload_it = action("Unload", unload, "unload");
  const load_it = action("Load", load, "load", load_begun.has(name));
  const {state: kind, draining} = model;
  if (kind === "standby") return [load_it, unload_it, pin_it, ask_why, read_log, ...pages];
  const may_end = ["ready", "loading"].includes(kind) || (draining && draining.seconds_left === null);
  return [may_end ? unload_it : load_it, pin_it, ask_why, read_log, ...pages];
}

// The page of a model's engine, which loads the model when it is opened. Where there are keys, such pages
// need a port of their own.
function engine_page(name) {
  const text = "Engine's page";
  return {
    text,
    label: `${text}: ${name}`,
    href: `upstream/${encodeURIComponent(name)}/`,
    term: "engine's page",
  };
}

function may_open(name) {
  const mine = state.key;
  return !mine || (mine.pages && (!mine.models || mine.models.includes(name)));
}

// Who waits, and for what

let asked = 0; // when the sentences were asked for

function show_queued() {
  const waiting = state.queued;
  reveal($("queued").closest("section"), waiting.length > 0);
  if (!waiting.length) $("reasons").replaceChildren();
  else if (Date.now() - asked > 900) show_reasons();
  put($("waiting"), state.waiting > waiting.length ? `the first ${waiting.length} of ${state.waiting}` : "");
  list(
    $("queued"),
    waiting,
    each => each.ticket,
    begin_queued,
    (made, each) => {
      put(made.children[2], span(Math.max(0, now() - each.since)));
    },
  );
}

function begin_queued({ticket, model}) {
  const made = row(["", "Number"], [""], ["number", "Waited"], [""]);
  put(made.children[0], "#" + ticket);
  made.children[1].append(make("span", "name", model));
  const cancel = button("Cancel", () => post("requests/cancel", {ticket}), "cancel");
  cancel.className = "act";
  set(cancel, "aria-label", `Cancel request ${ticket} for ${model}`);
  made.children[3].append(make("div", "buttons", cancel));
  return made;
}

async function show_reasons() {
  asked = Date.now();
  const models = [...new Set(state.queued.map(each => each.model))].slice(0, 4);
  const reasons = [];
  for (const name of models) {
    try {
      reasons.push([name, await sentence(name)]);
    } catch {
      return;
    }
  }
  const still = new Set(state ? state.queued.map(each => each.model) : []);
  const shown = reasons.filter(([name]) => still.has(name));
  list(
    $("reasons"),
    shown,
    ([name]) => name,
    () => make("p", "reason"),
    (made, [, text]) => put(made, text),
  );
}

async function sentence(name) {
  const answer = await ask("why?model=" + encodeURIComponent(name));
  if (!answer.ok) throw answer;
  const {sentence, hosts} = await answer.json();
  const out = (hosts || []).filter(each => each.left_out).map(each => `${each.host} (${each.left_out})`);
  return sentence + (out.length ? ` Left out: ${first_of(out)}.` : "");
}
