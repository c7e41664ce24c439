// What was: folds over the events, and the requests that ended.

const KEPT = 2000;
const SWAPS = 60;
const REQUESTS = 100;
let events = [];
let requests = [];

// When each model was resident

const STATES = {
  loading: "loading",
  cancelling: "evicting",
  ready: "ready",
  draining: "draining",
  evicting: "evicting",
  stopped: "stopped",
  standby: "stopped",
  demoting: "stopped",
  stuck: "stuck",
};
const BEFORE = {
  ready: "loading",
  draining: "ready",
  evicting: "draining",
  loading: "stopped",
  cancelling: "loading",
  stuck: "evicting",
  stopped: "evicting",
  standby: "evicting",
  demoting: "standby",
};
// Causes of events that say how something was found
const FOUND = ["adopted", "not_found", "host_gone", "unfit"];

// Model -> its bars and marks between two moments.
function bars(from, to) {
  const tracks = {};
  for (const name of Object.keys(state.models)) tracks[name] = {bars: [], marks: []};
  const open = {}; // backend -> its bar that goes on
  for (const event of events) {
    if (event.kind === "host_lost") {
      const there = Object.values(open).filter(each => each.host === event.cause.host);
      for (const each of there) lose(tracks, each, event, from);
    } else if (tracks[event.model]) {
      take_event(tracks, open, event, from);
    }
  }
  for (const each of Object.values(open)) end(tracks, each, to, from);
  const known = new Set(Object.values(open).map(each => each.model));
  for (const [name, model] of Object.entries(state.models)) {
    if (!known.has(name) && !model.host_lost)
      end(tracks, {model: name, state: STATES[model.state], since: from}, to, from);
  }
  return tracks;
}

function take_event(tracks, open, event, from) {
  const {at, kind, model, backend, cause, text, host} = event;
  if (kind === "deferred" && at >= from) tracks[model].marks.push({at, text});
  if (!STATES[kind]) return;
  const was_found = FOUND.includes(cause?.kind);
  end(tracks, open[backend] || {model, state: was_found ? "stopped" : BEFORE[kind], since: from}, at, from);
  if (kind === "stopped" && cause && !was_found)
    tracks[model].bars.push({state: "failed", since: at, until: at, text});
  open[backend] = {model, state: STATES[kind], since: at, host};
}

function lose(tracks, was, event, from) {
  const {at, reason} = event;
  end(tracks, was, at, from);
  if (was.state !== "stopped" && at > from && tracks[was.model])
    tracks[was.model].bars.push({state: "failed", since: at, until: at, text: reason});
  was.state = "stopped";
}

function end(tracks, was, until, from) {
  if (was.state === "stopped" || was.state === "standby" || until <= from || !tracks[was.model]) return;
  tracks[was.model].bars.push({state: was.state, since: Math.max(was.since, from), until});
}

function show_time() {
  const to = now();
  const known = events.length ? to - events[0].at : 0;
  const length = Number($("window").value) || Math.min(Math.max(60, known * 1.05), 7200);
  const from = to - length;
  const tracks = bars(from, to);
  const is_empty = Object.values(tracks).every(track => !track.bars.length && !track.marks.length);
  reveal($("tracks").closest("section"), events.length > 0 || !is_empty);
  list(
    $("tracks"),
    Object.keys(state.models),
    name => name,
    begin_track,
    (made, name) => {
      draw_track(made.lastChild, name, tracks[name], from, length);
    },
  );
  const format = length < 1000 ? SECOND : MINUTE;
  const ticks = [0, 1, 2, 3].map(part => clock(from + (part * length) / 3, format));
  list(
    $("axis"),
    ticks,
    (_, index) => index,
    () => make("span"),
    put,
  );
}

const SVG = "http://www.w3.org/2000/svg";

function begin_track(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("role", "img");
  return make("div", "track", make("div", "name", name), svg);
}

function draw_track(svg, name, {bars, marks}, from, length) {
  const place = at => `${((100 * (at - from)) / length).toFixed(2)}%`;
  const parts = bars.map(bar => {
    const title = bar_words(name, bar);
    if (bar.state === "failed") return failure_mark(place(bar.since), title);
    const width = `${Math.max(0.15, (100 * (bar.until - bar.since)) / length).toFixed(2)}%`;
    return bar_drawn(bar.state, colour(name), {x: place(bar.since), width, height: "100%"}, title);
  });
  const dots = marks.map(mark => {
    const dot = {cx: place(mark.at), cy: "50%", r: 3.5, fill: "var(--ink)"};
    return {tag: "circle", attributes: dot, title: `${name}, ${clock(mark.at)}: ${mark.text}`};
  });
  const above = each => each.tag === "text"; // failures lie on top of the others
  const drawn = [...parts.filter(each => !above(each)), ...dots, ...parts.filter(above)];
  const text = JSON.stringify(drawn);
  if (svg.dataset.drawn === text) return;
  svg.dataset.drawn = text;
  svg.replaceChildren(...drawn.map(svg_part));
  set(
    svg,
    "aria-label",
    parts
      .slice(-3)
      .map(each => each.title)
      .join("; ") || `${name}: not resident`,
  );
}

function bar_words(name, {state: kind, since, until, text}) {
  const word = kind === "ready" ? "resident" : kind;
  const times = `${clock(since)} to ${clock(until)} (${span(until - since)})`;
  return `${name}: ${word} ${times}${text ? ": " + text : ""}`;
}

function bar_drawn(kind, paint, place, title) {
  const looks = {
    loading: () => ({fill: `url(#${stripes(paint)})`}),
    stuck: () => ({fill: "url(#crossed)"}),
    draining: () => ({fill: paint, class: "hollow", stroke: paint}),
    evicting: () => ({fill: paint, class: "hollow", stroke: paint}),
    ready: () => ({fill: paint}),
  };
  return {tag: "rect", attributes: {...place, ...looks[kind]()}, title};
}

function failure_mark(x, title) {
  return {
    tag: "text",
    attributes: {class: "failed", x, y: "84%", "text-anchor": "middle"},
    title,
    glyph: "×",
  };
}

function svg_part({tag, attributes, title, glyph = ""}) {
  const part = document.createElementNS(SVG, tag);
  const words = document.createElementNS(SVG, "title");
  for (const [key, value] of Object.entries(attributes)) part.setAttribute(key, value);
  words.textContent = title;
  if (glyph) part.append(glyph);
  part.append(words);
  return part;
}

// The stripes of a colour, which are made when they are first needed.
function stripes(paint) {
  const id = "stripes-" + paint.replace(/\W/g, "");
  if (!$(id)) {
    const made = $("stripes").cloneNode(true);
    made.id = id;
    made.firstChild.setAttribute("fill", paint);
    $("patterns").append(made);
  }
  return id;
}

$("window").onchange = () => {
  if (state) show_time();
};

// Swaps: each load with those that made room for it; loads that nobody left for; deferrals; what went wrong

const OF_THE_WHOLE = ["paused", "resumed", "reloaded", "reload_failed"]; // kinds of events

function swaps() {
  const found = [];
  const leaving = {}; // backend -> its drain, as it began
  const open = {}; // backend -> its load
  const tell = (event, about) => {
    const {at, kind, model, backend, text} = event;
    found.push({
      key: `${kind} ${at} ${backend || text}`,
      at,
      model: model || "anvil-mux",
      plain: text,
      ...about,
    });
  };
  for (const event of events) {
    const {kind, backend} = event;
    const load = open[backend];
    if (kind.startsWith("host_")) {
      if (kind === "host_lost") lose_swaps(leaving, open, event);
      tell(event, {bad: kind === "host_lost"});
    } else if (OF_THE_WHOLE.includes(kind)) tell(event, {bad: kind === "reload_failed"});
    else if (["pinned", "unpinned", "deferred"].includes(kind)) tell(event, {soft: true});
    else if (kind === "draining") leaving[backend] = event;
    else if (kind === "evicting") note_evicting(leaving, event);
    else if (kind === "loading") found.push((open[backend] = begin_swap(leaving, event)));
    else if (load && ["ready", "cancelling", "stopped", "stuck"].includes(kind)) {
      load.ended = event.at;
      load.failed = {ready: "", cancelling: event.text}[kind] ?? event.reason;
      delete open[backend];
    } else if (kind === "ready" && event.cause) {
      tell(event);
      delete leaving[backend];
    } else if (kind === "stuck") tell(event, {bad: true});
    else if (["stopped", "standby"].includes(kind)) {
      const left = leaving[backend];
      if (left && !left.target) {
        tell(event, {at: left.at, plain: `evicted (${left.reason})${severed_words([left])}`});
        delete leaving[backend];
      } else if (kind === "stopped" && event.cause) tell(event, {bad: true});
    }
  }
  return found.slice(-SWAPS).reverse();
}

function lose_swaps(leaving, open, {at, cause: {host}, reason}) {
  for (const [name, load] of Object.entries(open)) {
    if (load.host !== host) continue;
    Object.assign(load, {ended: at, failed: reason});
    delete open[name];
  }
  for (const [name, drain] of Object.entries(leaving)) if (drain.host === host) delete leaving[name];
}

function note_evicting(leaving, {backend, size, cause, reason}) {
  const short = cause?.kind === "standby_full" ? reason : "";
  if (leaving[backend]) leaving[backend] = {...leaving[backend], severed: size, short};
}

function begin_swap(leaving, {at, model, backend, host, reason}) {
  const victims = Object.entries(leaving).filter(([, each]) => each.target === model);
  for (const [name] of victims) delete leaving[name];
  const from = victims.map(([, each]) => each);
  const began = Math.min(at, ...from.map(each => each.at));
  return {key: `swap ${at} ${backend}`, at: began, model, host, from, reason, loading: at};
}

function severed_words(victims) {
  const cut = victims.reduce((sum, each) => sum + (each.severed || 0), 0);
  return cut ? `; ${several(cut, "request")} severed` : "";
}

// Whose place a model took, and how that went: "small → large", "swapped in 4.1 s (3.1 s of it loading)".
function swap_words({from, model, host, at, loading, ended, failed}) {
  const victims = from.map(victim => victim.model).join(" and ");
  const name = (victims ? `${victims} → ${model}` : model) + (host ? ` on ${host}` : "");
  if (failed) return {name, what: failed};
  if (!ended) return {name, what: `${victims ? "swap" : "load"} under way`};
  const rest = victims ? ` (${span(ended - loading)} of it loading)` : "";
  return {name, what: `${victims ? "swapped" : "loaded"} in ${span(ended - at)}${rest}`};
}

function show_swaps() {
  const found = swaps();
  reveal($("swaps").closest("section"), found.length > 0);
  const begin = () => {
    const words = make("div", "", make("span", "name"), make("span"), make("div", "note"));
    return make("li", "", make("time", "soft"), words);
  };
  list(
    $("swaps"),
    found,
    each => each.key,
    begin,
    (made, each) => {
      const [name, what, note] = made.lastChild.children;
      const words = each.plain ? {name: each.model, what: each.plain} : swap_words(each);
      put_time(made.firstChild, each.at);
      put(name, words.name);
      put(what, ": " + words.what);
      set(what, "class", each.bad || each.failed ? "bad-text" : each.soft ? "soft" : null);
      put_line(note, each.plain ? "" : each.reason + severed_words(each.from) + short_words(each.from));
    },
  );
}

function short_words(victims) {
  return victims
    .filter(each => each.short)
    .map(({model, short}) => `; ${model} had ${short}`)
    .join("");
}

// Requests that ended

function show_requests() {
  reveal($("requests").closest("section"), requests.length > 0);
  reveal($("look-head"), state.capture);
  list($("requests"), [...requests].reverse(), each => each.id + each.ended, begin_request, show_request);
}

function begin_request(each) {
  const figures = ["Waited", "First byte", "Answered in", "Tokens/s"].map(head => ["number", head]);
  const made = row(["", "Ended"], ["wide"], ["", "Answer"], ...figures, ["act number"]);
  const look = button("Show", () => open_request(each.id), "bodies");
  set(look, "aria-label", `Show the request of ${clock(each.ended)} for ${each.model}`);
  made.lastChild.append(look);
  return made;
}

function show_request(made, each) {
  const [ended, model, answer, waited, first, seconds, rate, look] = made.children;
  put_time(ended, each.ended);
  put(model, each.model + (each.fallback_of ? ` instead of ${each.fallback_of}` : ""));
  set(model, "class", "wide name");
  put(answer, each.code ? `${each.status} ${each.code}` : each.status);
  set(answer, "class", each.code ? "bad-text" : null);
  set(answer, "title", `${each.path} from ${each.client}, ${each.bytes} bytes, request ${each.id}`);
  put(waited, each.waited < 0.05 ? "" : span(each.waited));
  put(first, each.first_byte ? span(each.first_byte) : "");
  put(seconds, span(each.seconds));
  put(rate, per_second(each.tokens, each.seconds - (each.stream ? each.first_byte : each.waited)));
  reveal(look, state.capture);
}

function per_second(tokens, seconds) {
  return tokens > 1 && seconds > 0 ? (tokens / seconds).toFixed(1) : "";
}

// Usage

let usage_timer = 0;

async function show_usage() {
  clearTimeout(usage_timer);
  usage_timer = 0;
  if (!state) return;
  let usage;
  try {
    const answer = await ask("usage?since=" + $("usage-since").value);
    if (!answer.ok) return;
    ({usage} = await answer.json());
  } catch {
    return;
  }
  const is_longest = !$("usage-since").selectedOptions[0].nextElementSibling;
  reveal($("usage").closest("section"), usage.length > 0 || !is_longest);
  reveal($("usage-table"), usage.length > 0);
  reveal($("no-usage"), !usage.length);
  list($("usage"), usage, each => JSON.stringify([each.key, each.model]), begin_usage, show_usage_of);
}

function begin_usage() {
  const figures = ["Requests", "Tokens in", "Tokens out", "GPU time"].map(head => ["number", head]);
  return row(["name", "API key"], ["wide"], ...figures);
}

function show_usage_of(made, each) {
  const [key, model, asked, tokens_in, tokens_out, gpu_time] = made.children;
  put(key, each.key);
  put(model, each.model);
  put(asked, each.requests.toLocaleString("en"));
  set(asked, "title", each.failed ? `${each.failed} of them failed` : null);
  put(tokens_in, each.prompt_tokens.toLocaleString("en"));
  set(tokens_in, "title", each.cached_tokens ? `${each.cached_tokens} of them were cached` : null);
  put(tokens_out, each.tokens.toLocaleString("en"));
  put(gpu_time, span(each.gpu_seconds));
}

$("usage-since").onchange = show_usage;
