// The stream of what happens, by which the page lives.

let source = {open: false, close() {}};

const TAKES = {
  snapshot(data) {
    state = data;
    events = data.events;
    requests = data.requests;
    skew = data.now - Date.now() / 1000;
    show();
    show_swaps();
    show_requests();
    show_usage();
  },
  state(data) {
    state = {...data, key: state.key};
    show();
  },
  event(event) {
    events.push(event);
    if (events.length > KEPT) events = events.slice(-KEPT);
    const {kind, cause, model, text} = event;
    if (["ready", "stuck"].includes(kind) || (kind === "stopped" && cause)) say(`${model}: ${text}`);
    if (OF_THE_WHOLE.includes(kind)) say(text);
    soon();
  },
  requests(data) {
    requests = [...requests, ...data.requests].slice(-REQUESTS);
    take_records(data.requests);
    soon();
    usage_timer ||= setTimeout(show_usage, 2000);
  },
  lost() {
    connect();
  },
};

// It is read by hand, since an EventSource cannot show a key.
async function connect() {
  source.close();
  const stop = new AbortController();
  const mine = {
    open: false,
    close() {
      mine.open = false;
      stop.abort();
    },
  };
  source = mine;
  try {
    const answer = await ask("events", {signal: stop.signal});
    if (answer.status === 403) lock((await answer.json()).error.message);
    else if (answer.ok) {
      mine.open = true;
      await read_events(answer.body, (data, kind) => {
        if (mine.open && TAKES[kind]) TAKES[kind](data);
      });
    }
  } catch (error) {
    if (!stop.signal.aborted && !(error instanceof TypeError)) console.error(error);
  }
  mine.open = false;
  if (stop.signal.aborted) return;
  health("bad", "no answer; trying again");
  setTimeout(() => {
    if (source === mine) connect();
  }, 2000);
}

// Server-sent events, each as its data and its kind; comments are left out.
async function read_events(body, take) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const blocks = (rest + value).split(/\r?\n\r?\n/);
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = block.split(/\r?\n/).filter(line => line.startsWith("data:"));
      const data = lines.map(line => line.slice(5).trim()).join("\n");
      if (data && data !== "[DONE]") take(JSON.parse(data), (block.match(/^event: ?(.*)/m) || [])[1]);
    }
  }
}

let is_soon = false;

function soon() {
  if (is_soon) return;
  is_soon = true;
  setTimeout(() => {
    is_soon = false;
    if (!state) return;
    show_swaps();
    show_requests();
    show_time();
  }, 50);
}

// The clock moves what depends on it: each second while somebody waits or something moves, else seldom.

let ticks = 0;

setInterval(() => {
  if (!state || document.hidden || !source.open) return;
  const moving = ["loading", "cancelling", "draining", "evicting"];
  const is_moving =
    state.queued.length || Object.values(state.models).some(model => moving.includes(model.state));
  if (Object.values(state.hosts || {}).some(host => host.lost)) show_gpus();
  if (is_moving) {
    show_queued();
    show_time();
    show_swaps();
  } else if (ticks++ % 10 === 0) show_time();
}, 1000);

// A browser may keep a page that was left, to come back to: its stream must not keep one of the few
// connections.
window.onpagehide = () => source.close();
window.onpageshow = event => {
  if (event.persisted) connect();
};
document.onvisibilitychange = () => {
  if (!document.hidden && state) show();
};
connect();
