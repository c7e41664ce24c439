// Terms: what each means, once, from the glossary. A mouse finds it at the word, the others behind the ? of
// each part.

const TERMS = Object.fromEntries(
  [...$("terms").querySelectorAll("dt")].map(dt => [dt.textContent, dt.nextSibling.textContent]),
);

function explain(element, term) {
  set(element, "title", TERMS[term] ? `${term}: ${TERMS[term]}` : null);
}

function chip(element, kind, text, term = kind) {
  set(element, "class", "chip " + kind);
  put(element, text);
  explain(element, term);
}

function terms_of(section) {
  const named = [...section.querySelectorAll("[data-term]")].map(each => each.dataset.term);
  return [...new Set([...named, ...(section.dataset.terms || "").split(", ")])].filter(term => TERMS[term]);
}

function show_terms(section, title) {
  put($("words-title"), `What the words under “${title}” mean`);
  $("words-list").replaceChildren(
    ...terms_of(section).flatMap(term => [make("dt", "", term), make("dd", "", TERMS[term])]),
  );
  $("words").showModal();
}

for (const each of document.querySelectorAll("[data-term]")) explain(each, each.dataset.term);
for (const section of document.querySelectorAll("main > section:is([data-terms], :has([data-term]))")) {
  const title = section.querySelector("h2").textContent;
  const ask = button("?", () => show_terms(section, title));
  ask.className = "words";
  set(ask, "aria-label", `What the words under ${title} mean`);
  section.querySelector(".title").append(ask);
}

// Figures

let skew = 0; // of this machine's clock, in seconds
const now = () => Date.now() / 1000 + skew;

function span(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 0.0005) return "0";
  if (seconds < 1) return Math.round(seconds * 1000) + " ms";
  if (seconds < 10) return seconds.toFixed(1) + " s";
  if (seconds < 120) return Math.round(seconds) + " s";
  return seconds < 7200 ? Math.round(seconds / 60) + " min" : (seconds / 3600).toFixed(1) + " h";
}

const gib = bytes => (bytes / 2 ** 30).toFixed(1) + " GiB";
const percent = share => `${Math.round(100 * Math.min(1, Math.max(0, share)))}%`;
const several = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const still_run = count => `${several(count, "request")} still run${count === 1 ? "s" : ""}`;
const first_of = (words, most = 6) =>
  words.slice(0, most).join(", ") + (words.length > most ? ` and ${words.length - most} more` : "");
const ORDER = new Intl.Collator("en", {numeric: true});

// Times are those of the reader's time zone; what was not today has its day as well.

const HOUR = {hour: "2-digit", minute: "2-digit", hourCycle: "h23"};
const MINUTE = new Intl.DateTimeFormat([], HOUR);
const SECOND = new Intl.DateTimeFormat([], {...HOUR, second: "2-digit"});
const DAY = new Intl.DateTimeFormat([], {day: "numeric", month: "short"});
const FULL = new Intl.DateTimeFormat([], {dateStyle: "full", timeStyle: "long"});
put($("zone"), `times of your zone, ${Intl.DateTimeFormat().resolvedOptions().timeZone}`);

function clock(at, format = SECOND) {
  const date = new Date(at * 1000);
  const is_today = date.toDateString() === new Date(now() * 1000).toDateString();
  return (is_today ? "" : DAY.format(date) + " ") + format.format(date);
}

function put_time(element, at) {
  const text = clock(at);
  if (element.textContent === text) return;
  put(element, text);
  set(element, "title", FULL.format(new Date(at * 1000)));
}
