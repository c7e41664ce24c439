"use strict";

// Elements: each is made once for its key, then only changed where something differs.

const $ = id => document.getElementById(id);

function make(tag, name, ...inside) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.append(...inside);
  return element;
}

function put(element, text) {
  text = String(text);
  if (element.textContent !== text) element.textContent = text;
}

function set(element, name, value) {
  if (value === null || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

function set_style(element, name, value) {
  if (element.style[name] !== value) element.style[name] = value;
}

function reveal(element, is_shown) {
  set(element, "hidden", is_shown ? null : "");
}

// A line that is there only while it says something.
function put_line(element, text) {
  put(element, text);
  reveal(element, text !== "");
}

// The children of a parent become one for each item, in their order. Who has the focus keeps it; if its child
// goes, the focus goes to the child that takes its place.
function list(parent, items, key_of, begin, change) {
  const focused = parent.contains(document.activeElement) ? document.activeElement : null;
  const place = [...parent.children].findIndex(child => child.contains(focused));
  const keys = items.map((item, index) => String(key_of(item, index)));
  const kept = new Set(keys);
  const old = new Map([...parent.children].map(child => [child.dataset.key, child]));
  for (const [key, child] of old) if (!kept.has(key)) child.remove();
  items.forEach((item, index) => {
    let child = old.get(keys[index]);
    if (!child) {
      child = begin(item);
      child.dataset.key = keys[index];
    }
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] || null);
    change(child, item);
  });
  while (parent.children.length > items.length) parent.lastChild.remove(); // two had the same key
  if (focused && document.activeElement !== focused) focus_again(focused, parent, place);
}

function focus_again(focused, parent, place) {
  const next = parent.children[Math.min(place, parent.children.length - 1)];
  const found = focused.isConnected ? focused : next && next.querySelector("button:not([hidden])");
  (found || $("main")).focus({preventScroll: true});
}

// A row of a table; a phone shows the head of a cell beside its figure.
function row(...cells) {
  const made = make("tr");
  for (const [name, head] of cells) {
    const cell = make("td", name);
    if (head) cell.dataset.head = head;
    made.append(cell);
  }
  return made;
}

function button(text, act, term) {
  const made = make("button", "", text);
  made.type = "button";
  made.onclick = act;
  if (term) explain(made, term);
  return made;
}

// Actions of a row: {text, label, act, term, is_off}, or with an href in the place of act, which a new tab
// opens. The first is its button, the others are in its menu.

function action_buttons() {
  const first = button("", event => {
    // The second click of two quick ones was meant for what the button said before.
    if (event.detail < 2 && first.getAttribute("aria-disabled") !== "true") first.action.act();
  });
  const more = button("⋯", () => toggle_menu(more));
  set(more, "aria-haspopup", "menu");
  set(more, "aria-expanded", "false");
  return make("div", "buttons", first, more);
}

function show_actions(buttons, name, actions) {
  const [first, more] = buttons.children;
  const [primary, ...others] = actions;
  reveal(first, Boolean(primary));
  reveal(more, others.length > 0);
  set(more, "aria-label", `More for ${name}`);
  more.actions = others;
  first.action = primary;
  if (!primary) return;
  put(first, primary.text);
  explain(first, primary.term);
  set(first, "aria-label", primary.label);
  set(first, "aria-disabled", primary.is_off ? "true" : null);
}

// The menu: one for all rows, filled when it opens. Arrows move in it, Escape and Tab leave it.

let menu_of = null; // the button that opened it

function toggle_menu(more) {
  if (menu_of === more) {
    close_menu();
    return;
  }
  close_menu();
  $("menu").replaceChildren(...more.actions.map(menu_item));
  menu_of = more;
  set(more, "aria-expanded", "true");
  set($("menu"), "aria-label", more.getAttribute("aria-label"));
  reveal($("menu"), true);
  place_menu();
  $("menu").firstChild.focus({preventScroll: true});
}

function menu_item({text, label, act, term, is_off, href}) {
  const item = href ? make("a", "", text) : button(text);
  item.onclick = () => {
    if (is_off) return;
    leave_menu();
    if (act) act();
  };
  set(item, "href", href || null);
  set(item, "target", href ? "_blank" : null);
  explain(item, term);
  set(item, "role", "menuitem");
  set(item, "tabindex", "-1");
  set(item, "aria-label", label);
  set(item, "aria-disabled", is_off ? "true" : null);
  return item;
}

// Below its button, or above it where there is no room below.
function place_menu() {
  if (!menu_of) return;
  const at = menu_of.getBoundingClientRect();
  const menu = $("menu");
  const fits = at.bottom + menu.offsetHeight < innerHeight || at.top < menu.offsetHeight;
  menu.style.top = `${scrollY + (fits ? at.bottom + 4 : at.top - menu.offsetHeight - 4)}px`;
  menu.style.left = `${scrollX + Math.max(8, at.right - menu.offsetWidth)}px`;
}

function close_menu() {
  if (!menu_of) return;
  set(menu_of, "aria-expanded", "false");
  menu_of = null;
  reveal($("menu"), false);
}

function leave_menu() {
  const opener = menu_of;
  close_menu();
  opener.focus({preventScroll: true});
}

$("menu").onkeydown = event => {
  const items = [...$("menu").children];
  const at = items.indexOf(document.activeElement);
  const next = {ArrowDown: at + 1, ArrowUp: at - 1 + items.length, Home: 0, End: items.length - 1}[event.key];
  if (next !== undefined) items[next % items.length].focus({preventScroll: true});
  if (next !== undefined || event.key === "Escape") event.preventDefault();
  if (["Escape", "Tab"].includes(event.key)) leave_menu();
};
window.onresize = place_menu;
$("menu").addEventListener("focusout", ({relatedTarget: to}) => {
  if (to !== menu_of && !$("menu").contains(to)) close_menu();
});
