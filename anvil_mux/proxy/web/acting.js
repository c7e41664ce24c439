// Keys: one that is asked for is shown with everything that the page asks, and kept for this tab.

const KEY = "anvil-mux key";
let key = "";
try {
  key = sessionStorage.getItem(KEY) || "";
} catch {
  // This browser keeps nothing: the key is asked for each time.
}

function keep(given) {
  key = given;
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // As above.
  }
}

async function ask(path, options = {}) {
  const headers = {...options.headers, "X-Requested-With": "anvil-mux"};
  if (key) headers.Authorization = "Bearer " + key;
  const answer = await fetch(path, {...options, headers});
  const unknown =
    "This key is not known here. Keys stand in the key_file, or in ANVIL_API_KEYS, of this anvil-mux.";
  if (answer.status === 401) lock(key ? unknown : "");
  return answer;
}

// Nothing of what was shown stays for whoever enters the next key.
function lock(why) {
  source.close();
  keep("");
  state = null;
  close_menu();
  close_log();
  forget_talk();
  document.title = "anvil-mux";
  health("bad", "an API key is needed");
  put($("load"), "");
  document.body.classList.add("locked");
  for (const each of ["rights", "forget"]) reveal($(each), false);
  reveal($("locked"), true);
  put_line($("refused"), why || $("refused").textContent);
  $("key").focus();
}

$("unlock").onsubmit = event => {
  event.preventDefault();
  const given = $("key").value.trim();
  $("key").value = "";
  if (!/^[!-~]+$/.test(given)) {
    lock("A key has neither blanks nor letters with accents. Perhaps more was copied than the key.");
    return;
  }
  keep(given);
  health("loading", "connecting");
  connect();
};

$("forget").onclick = () => {
  keep("");
  location.reload();
};

const is_reader = () => Boolean(state.key) && !state.key.admin;

function show_key() {
  const mine = state.key;
  const reads =
    "It may see this page. To load, unload, pin, pause, drain or cancel, and to read logs, " +
    "a key with the right “admin” is needed.";
  document.body.classList.remove("locked");
  document.body.classList.toggle("read-only", is_reader());
  reveal($("locked"), false);
  reveal($("forget"), mine && key);
  put_line(
    $("rights"),
    mine ? `API key: ${mine.name}. ${mine.admin ? "It may see and do everything here." : reads}` : "",
  );
}

// What is done by hand

async function post(path, body) {
  try {
    const headers = {"Content-Type": "application/json"};
    const answer = await ask(path, {method: "POST", headers, body: JSON.stringify(body)});
    if (answer.ok) return;
    const {error} = await answer.json().catch(() => ({}));
    notice(error?.message || `anvil-mux answered ${answer.status}`);
  } catch {
    notice("anvil-mux does not answer");
  }
}

async function load(name) {
  load_begun.add(name);
  show();
  await post("models/load?wait=true", {model: name});
  load_begun.delete(name);
  show();
}

function unload(name) {
  const {leases, waiting, state: kind} = state.models[name];
  const who = `${several(waiting, "request")} of ${name} wait`;
  const fails = `${who} for its load, and fail if it is cancelled. Cancel it?`;
  if (waiting && kind === "loading" && !confirm(fails)) return;
  if (may_sever(leases, ` of ${name}`, "Unload it?")) post("models/unload", {model: name});
}

function pin(name) {
  post(state.models[name].pinned ? "models/unpin" : "models/pin", {model: name});
}

function drain_host(name) {
  const {drained} = state.hosts[name];
  const backends = Object.values(state.models).flatMap(model => Object.values(model.backends));
  const leases = backends.filter(each => each.host === name).reduce((sum, each) => sum + each.leases, 0);
  if (drained) post("hosts/undrain", {host: name});
  else if (may_sever(leases, ` on ${name}`, "Drain it?")) post("hosts/drain", {host: name});
}

function declare_gone(name) {
  const question = "counts as stopped then. Is it certain that nothing runs there any more?";
  if (confirm(`What was loaded on ${name} ${question}`)) post("hosts/gone", {host: name});
}

$("pause").onclick = () => {
  const last = $("lasts").value;
  if (state.paused) post("resume", {});
  else if (may_sever(state.leases, "", "Pause, and free all GPUs?")) post("pause", last ? {for: last} : {});
};

function may_sever(count, where, question) {
  const fate = "They have a while to end, then they are severed (aborted).";
  return !count || confirm(`${still_run(count)}${where}. ${fate} ${question}`);
}

async function why(name) {
  if (whys[name]) delete whys[name];
  else {
    try {
      whys[name] = await sentence(name);
    } catch {
      if (state) notice("anvil-mux does not answer");
    }
  }
  show();
  if (whys[name]) say(whys[name]);
}

// What is told: for all in a notice that goes by itself, or for screen readers

function notice(text) {
  const made = make("p", "", text);
  $("notices").append(made);
  setTimeout(() => made.remove(), 12000);
}

function say(text) {
  put($("said"), text);
}

// The log of an engine, in a panel below the page that goes on while it is open

let log = null; // {model, backend, opener, timer}

async function open_log(model) {
  close_log();
  log = {model, backend: "", opener: document.activeElement, timer: setInterval(read_log, 1000)};
  put($("log-title"), `Log of ${model}`);
  put($("log-lines"), "");
  reveal($("log"), true);
  document.body.classList.add("has-log");
  show_log_state();
  $("log-lines").focus({preventScroll: true});
  await read_log();
}

async function read_log() {
  if (document.hidden) return;
  const mine = log;
  const backend = mine.backend ? "&backend=" + encodeURIComponent(mine.backend) : "";
  try {
    const answer = await ask(`logs?lines=400&model=${encodeURIComponent(mine.model)}${backend}`);
    const {error, lines, backends, backend: shown} = await answer.json();
    if (mine !== log) return;
    if (error) throw new Error(error.message);
    show_replicas(backends, shown);
    keep_at_end($("log-lines"), () => put($("log-lines"), lines.join("\n") || "(nothing yet)"));
  } catch (error) {
    if (mine === log)
      put($("log-lines"), error instanceof TypeError ? "anvil-mux does not answer" : error.message);
  }
}

function show_replicas(backends, shown) {
  const choice = $("log-backend");
  reveal(choice.parentElement, backends.length > 1);
  list(
    choice,
    backends,
    name => name,
    name => make("option", "", name),
    () => {},
  );
  if (document.activeElement !== choice && choice.value !== shown) choice.value = shown;
}

function show_log_state() {
  if (!log) return;
  const model = state.models[log.model];
  if (model)
    chip(
      $("log-state"),
      model.state,
      model.progress ? `${model.state}, ${model.progress.words}` : model.state,
      model.state,
    );
  else close_log(); // it is not configured any more
}

function close_log() {
  if (!log) return;
  const {opener, timer} = log;
  clearInterval(timer);
  log = null;
  const had_focus = $("log").contains(document.activeElement);
  reveal($("log"), false);
  document.body.classList.remove("has-log");
  if (had_focus) (opener.isConnected ? opener : $("main")).focus({preventScroll: true});
}

$("log-close").onclick = close_log;
$("log").onkeydown = event => {
  if (event.key === "Escape") close_log();
};
$("log-backend").onchange = () => {
  log.backend = $("log-backend").value;
  put($("log-lines"), "");
  read_log();
};

// Whoever reads the end of something that grows goes on reading its end.
function keep_at_end(box, change) {
  const is_at_end = box.scrollTop + box.clientHeight >= box.scrollHeight - 30;
  change();
  if (is_at_end) box.scrollTop = box.scrollHeight;
}

// Dialogs: a request with its bodies, an address that a browser would ask for without the key, the terms

function open_text(title, text) {
  put($("text-title"), title);
  put($("text-lines"), text);
  $("text").showModal();
}

async function open_request(id) {
  let request;
  try {
    request = await (await ask("requests?id=" + encodeURIComponent(id))).json();
  } catch {
    notice("anvil-mux does not answer");
    return;
  }
  const {error, path, model, key: name, question, answer, status, code} = request;
  if (error) {
    notice(error.message);
    return;
  }
  const rest = is_cut => (is_cut ? "\n(the rest was not kept)" : "");
  const asked = request.question_is_form ? "(a form, which is not kept)" : pretty(question);
  open_text(
    `${path} of ${model}${name ? `, key ${name}` : ""}, request ${id}`,
    `asked:\n${asked}${rest(request.question_is_cut)}\n\n` +
      `answered: ${status} ${code}\n${pretty(answer)}${rest(request.answer_is_cut)}`,
  );
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

for (const link of document.querySelectorAll("footer a"))
  link.onclick = async event => {
    if (!key) return;
    event.preventDefault();
    const path = link.getAttribute("href");
    try {
      open_text("/" + path, await (await ask(path)).text());
    } catch {
      notice("anvil-mux does not answer");
    }
  };

for (const name of ["text", "words"]) {
  $(name + "-close").onclick = () => $(name).close();
  $(name).onclick = event => {
    if (event.target === $(name)) $(name).close();
  };
}
