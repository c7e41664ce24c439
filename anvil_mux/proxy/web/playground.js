// The playground: a conversation with a model, by the route that all clients use. It is kept until the page
// is left, or a new one is begun.

let talk = []; // its turns
let speaking = null; // the turn that is under way

function show_try() {
  const names = [...state.registry, ...Object.keys(state.any_of || {})];
  const mine = state.key && state.key.models;
  const begin = name => {
    const made = make("option", "", name);
    made.value = name;
    return made;
  };
  list(
    $("try-model"),
    mine ? names.filter(name => mine.includes(name)) : names,
    name => name,
    begin,
    () => {},
  );
}

$("try").onsubmit = async event => {
  event.preventDefault();
  if (speaking) return;
  speaking = begin_turn($("try-text").value, $("try-model").value, $("try-stream").checked);
  const turn = speaking;
  $("try-text").value = "";
  show_speaking();
  say("waiting for the first token");
  watch_wait(turn);
  try {
    await answer_turn(turn, [...messages_of(talk), {role: "user", content: turn.question}]);
  } catch (error) {
    if (error.name === "AbortError") turn.is_stopped = true;
    else turn.error = error.message.split("\n")[0]; // below it are lines of the engine's log
  }
  end_turn(turn);
};

function begin_turn(question, model, is_streamed) {
  const parts = {thoughts: make("span", "soft"), words: make("span"), note: make("div", "note")};
  const answer = make("div", "answer", parts.thoughts, parts.words);
  $("talk").append(make("li", "", make("div", "question", question), answer, parts.note));
  reveal($("talk"), true);
  $("talk").scrollTop = $("talk").scrollHeight;
  const stop = new AbortController();
  return {
    question,
    model,
    is_streamed,
    ...parts,
    stop,
    began: now(),
    first: 0,
    ended: 0,
    pieces: 0,
    tokens: 0,
  };
}

function messages_of(turns) {
  const answered = turns.filter(turn => !turn.error && turn.words.textContent);
  return answered.flatMap(({question, words}) => [
    {role: "user", content: question},
    {role: "assistant", content: words.textContent},
  ]);
}

async function answer_turn(turn, messages) {
  const options = turn.is_streamed ? {stream_options: {include_usage: true}} : {};
  const answer = await ask("v1/chat/completions", {
    method: "POST",
    signal: turn.stop.signal,
    headers: {"Content-Type": "application/json"},
    body: JSON.stringify({model: turn.model, stream: turn.is_streamed, messages, ...options}),
  });
  turn.id = answer.headers.get("X-Request-ID");
  if (!answer.ok) {
    const {error} = await answer.json().catch(() => ({}));
    throw new Error(error?.message || `anvil-mux answered ${answer.status}`);
  }
  if (turn.is_streamed) await read_events(answer.body, part => take_part(turn, part));
  else take_part(turn, await answer.json());
}

function take_part(turn, {error, choices, usage}) {
  if (error) throw new Error(error.message || JSON.stringify(error));
  const part = choices?.[0]?.delta || choices?.[0]?.message || {};
  const thought = part.reasoning_content || part.reasoning || "";
  if (thought || part.content) {
    turn.first ||= now();
    turn.pieces += 1;
  }
  keep_at_end($("talk"), () => {
    turn.thoughts.append(thought);
    turn.words.append(part.content || "");
    if (usage) turn.tokens = usage.completion_tokens || 0;
    if (turn.first) put(turn.note, turn_words(turn));
  });
}

function end_turn(turn) {
  turn.ended = now();
  if (speaking === turn) speaking = null;
  if (!turn.note.isConnected) return; // a new conversation was begun
  talk.push(turn);
  turn.record = requests.find(each => each.id === turn.id);
  if (turn.error && !$("try-text").value) $("try-text").value = turn.question;
  keep_at_end($("talk"), () => put(turn.note, turn_words(turn)));
  set(turn.note, "class", turn.error ? "error" : "note");
  say(turn_words(turn));
  show_speaking();
}

function show_speaking() {
  if (!speaking && document.activeElement === $("try-stop")) $("try-text").focus();
  set($("try-send"), "aria-disabled", speaking ? "true" : null);
  reveal($("try-stop"), speaking);
  reveal($("try-new"), talk.length > 0 && !speaking);
}

function forget_talk() {
  if (speaking) speaking.stop.abort();
  speaking = null;
  talk = [];
  $("talk").replaceChildren();
  reveal($("talk"), false);
  show_speaking();
}

// While a turn waits for its first token its note says for what, like the list of those who wait.
async function watch_wait(turn) {
  const is_waiting = () => speaking === turn && !turn.first;
  for (let pause = 300; is_waiting(); pause = 1000) {
    const is_queued = state && state.models[model_behind(turn.model)]?.waiting;
    const why = is_queued ? await sentence(turn.model).catch(() => "") : "";
    if (is_waiting()) put(turn.note, why || `waiting for the first token for ${span(now() - turn.began)}`);
    await new Promise(resolve => setTimeout(resolve, pause));
  }
}

const model_behind = name => state.any_of?.[name]?.serves || name;

// The record of its request says how long a turn waited. It comes before or after the end of the answer.
function take_records(records) {
  for (const turn of talk) {
    const record = records.find(each => each.id === turn.id);
    if (!record) continue;
    turn.record = record;
    put(turn.note, turn_words(turn));
  }
}

function turn_words(turn) {
  if (turn.error) return turn.error;
  const {began, first, pieces, tokens, is_streamed} = turn;
  const ended = turn.ended || now();
  const count = tokens || pieces;
  const rate = per_second(count, ended - (is_streamed ? first : began));
  const words = turn.is_stopped ? ["stopped"] : [];
  if (!first) return [...words, "no text came"].join("; ");
  if (is_streamed) words.push(`first token after ${span(first - began)}`);
  const took = is_streamed ? "" : ` in ${span(ended - began)}`;
  words.push(`${several(count, "token")}${took}${rate && `, ${rate} tokens/s`}`);
  return [...words, ...wait_words(turn)].join("; ");
}

// What a turn waited for: the load of its model, and who made room for it; else its turn.
function wait_words({record, began, first}) {
  if (!record || record.waited < 0.05) return [];
  const made_it_wait = ({loading, model, at, ended}) =>
    loading && model === record.model && at < first && !(ended < began);
  const swap = swaps().findLast(made_it_wait); // the first of them: the newest stand first
  const {name, what} = swap ? swap_words(swap) : {};
  return [`waited ${span(record.waited)} for ${swap ? `${name} (${what})` : "its turn"}`];
}

$("try-stop").onclick = () => speaking && speaking.stop.abort();
$("try-new").onclick = () => {
  forget_talk();
  $("try-text").focus();
};
$("try-text").onkeydown = event => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  $("try").requestSubmit();
};
