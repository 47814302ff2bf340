/**
 * Markdown of a model as nodes: no text of it ever becomes markup of the page.
 *
 * Links go to http, https and mailto alone; an image is its link, as the page asks no other server for anything.
 */

import { html, useMemo } from "../dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const CELLS = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)+\|?\s*$/;
const MAX_DEPTH = 8;

/** `is_item`: its first paragraph is the text of an item, and none by itself. */
function blocks_of(text, depth = 0, is_item = false) {
	const lines = text.split("\n");
	const found = [];
	for (let at = 0; at < lines.length; ) at = block(lines, at, found, depth, is_item);
	return found;
}

function block(lines, at, found, depth, is_item) {
	const text = lines[at];
	if (!text.trim()) return at + 1;
	const fence = text.match(FENCE);
	if (fence) return fenced(lines, at, found, fence);
	const heading = text.match(HEADING);
	if (heading || RULE.test(text)) {
		found.push(heading ? titled(heading) : html`<hr />`);
		return at + 1;
	}
	if (depth < MAX_DEPTH && QUOTE.test(text)) return quoted(lines, at, found, depth);
	if (depth < MAX_DEPTH && ITEM.test(text)) return listed(lines, at, found, depth);
	if (text.includes("|") && CELLS.test(lines[at + 1] ?? "")) return tabled(lines, at, found);
	return paragraph(lines, at, found, is_item && !found.length);
}

/** Headings of the page are above it. */
const titled = ([, { length }, text]) => html`<p class="heading" role="heading" aria-level=${Math.min(6, length + 2)}>${inline(text)}</p>`;

function fenced(lines, at, found, fence) {
	const inside = [];
	let end = at + 1;
	const closes = (text) => text.trim().startsWith(fence[1]) && !text.trim().slice(fence[1].length).replaceAll(fence[1][0], "");
	while (end < lines.length && !closes(lines[end])) inside.push(lines[end++]);
	const text = inside.join("\n");
	const copy = () => navigator.clipboard?.writeText(text);
	found.push(html`<figure class="code">
		<figcaption><span>${fence[2] || "text"}</span><button class="plain" onClick=${copy}>Copy</button></figcaption>
		<pre tabindex="0"><code>${text}</code></pre>
	</figure>`);
	return end + 1;
}

function quoted(lines, at, found, depth) {
	const inside = [];
	let end = at;
	for (let one; end < lines.length && (one = lines[end].match(QUOTE)); end += 1) inside.push(one[1]);
	found.push(html`<blockquote>${blocks_of(inside.join("\n"), depth + 1)}</blockquote>`);
	return end;
}

function listed(lines, at, found, depth) {
	const first = lines[at].match(ITEM);
	const indent = first[1].length;
	const is_ordered = /\d/.test(first[2]);
	const items = [];
	let end = at;
	for (; end < lines.length; end += 1) {
		const item = lines[end].match(ITEM);
		const deep = lines[end].search(/\S/);
		if (item && item[1].length <= indent) {
			if (item[1].length < indent || /\d/.test(item[2]) !== is_ordered) break;
			items.push([item[3]]);
		} else if (deep < 0) {
			const next = lines[end + 1] ?? "";
			if (next.search(/\S/) <= indent && !ITEM.test(next)) break;
			items.at(-1).push("");
		} else if (deep > indent || lines[end - 1].trim()) {
			items.at(-1).push(lines[end].slice(Math.min(deep, indent + first[2].length + 1)));
		} else break;
	}
	const told = items.map((one) => html`<li>${blocks_of(one.join("\n"), depth + 1, true)}</li>`);
	found.push(is_ordered ? html`<ol start=${parseInt(first[2], 10) || 1}>${told}</ol>` : html`<ul>${told}</ul>`);
	return end;
}

const cells = (text) => text.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((one) => one.trim().replaceAll("\\|", "|"));

function tabled(lines, at, found) {
	const head = cells(lines[at]);
	const rows = [];
	let end = at + 2;
	while (end < lines.length && lines[end].includes("|")) rows.push(cells(lines[end++]).slice(0, head.length));
	found.push(html`<div class="table" tabindex="0"><table>
		<thead><tr>${head.map((one) => html`<th scope="col">${inline(one)}</th>`)}</tr></thead>
		<tbody>${rows.map((row) => html`<tr>${row.map((one) => html`<td>${inline(one)}</td>`)}</tr>`)}</tbody>
	</table></div>`);
	return end;
}

const begins = (text) => FENCE.test(text) || HEADING.test(text) || QUOTE.test(text) || ITEM.test(text) || RULE.test(text);

function paragraph(lines, at, found, is_bare) {
	let end = at + 1;
	while (end < lines.length && lines[end].trim() && !begins(lines[end])) end += 1;
	const nodes = inline(lines.slice(at, end).join("\n"));
	found.push(is_bare ? nodes : html`<p>${nodes}</p>`);
	return end;
}

const INLINE =
	/\\([\\`*_{}[\]()#+\-.!~|>])|(`+)([\s\S]*?[^`])\2(?!`)|!?\[([^\]\n]{0,500})\]\(([^()\s]{1,2000})(?:\s+"[^"\n]*")?\)|(https?:\/\/[^\s<>"')\]]{1,2000})|(\*\*|__)(?=\S)([\s\S]{1,4000}?\S)\7|(?<![\w*])(\*|_)(?=\S)([^*_]{1,4000}?\S|\S)\9(?![\w*])|~~(?=\S)([\s\S]{1,4000}?\S)~~/g;

function inline(text, depth = 0) {
	if (depth > MAX_DEPTH) return [text];
	const nodes = [];
	let from = 0;
	for (const one of text.matchAll(INLINE)) {
		if (one.index > from) nodes.push(text.slice(from, one.index));
		nodes.push(part(one, depth));
		from = one.index + one[0].length;
	}
	if (from < text.length) nodes.push(text.slice(from));
	return nodes;
}

function part(one, depth) {
	const [whole, escaped, , code, label, target, url, , bold, , italic, struck] = one;
	if (escaped !== undefined) return escaped;
	if (code !== undefined) return html`<code>${code.trim() || code}</code>`;
	if (target !== undefined) return link(target, label || target, whole, depth);
	if (url !== undefined) return link(url, url, whole, MAX_DEPTH);
	if (bold !== undefined) return html`<strong>${inline(bold, depth + 1)}</strong>`;
	if (italic !== undefined) return html`<em>${inline(italic, depth + 1)}</em>`;
	return html`<del>${inline(struck, depth + 1)}</del>`;
}

function link(target, label, whole, depth) {
	if (!/^(https?:\/\/|mailto:)/i.test(target)) return whole;
	return html`<a href=${target} target="_blank" rel="noopener noreferrer nofollow">${depth < MAX_DEPTH ? inline(label, MAX_DEPTH) : label}</a>`;
}

/** Where a text may be cut: behind an empty line that is in no fence. What stands before does not change any more. */
function pieces_of(text) {
	const pieces = [];
	let from = 0;
	let fence = null;
	let at = 0;
	for (const one of text.split("\n")) {
		const found = one.match(FENCE);
		if (found && (!fence || one.trim().startsWith(fence))) fence = fence ? null : found[1];
		at += one.length + 1;
		const is_cut = !fence && !one.trim() && !/^(\s|[-*+>]|\d{1,9}[.)])/.test(text.slice(at, at + 12));
		if (is_cut && text.slice(from, at).trim()) {
			pieces.push(text.slice(from, at));
			from = at;
		}
	}
	return [...pieces, text.slice(from)];
}

function Piece({ text }) {
	return useMemo(() => blocks_of(text), [text]);
}

/** A text in Markdown; while it grows only its end is drawn again. */
export function Markdown({ text }) {
	return html`<div class="markdown">${pieces_of(text).map((one, index) => html`<${Piece} key=${index} text=${one} />`)}</div>`;
}
