/** Where everything of the lanes stands, in pixels: a pure function. */

const BAR_PX = 24;
const SIDING_PX = 9;
const LANE_GAP_PX = 8;
const MODEL_GAP_PX = 14;
const HEAD_PX = 20;
const AXIS_PX = 20;
const ROOM_ABOVE_PX = 7; // for the arcs of hand-overs

/**
 * {height, heads, lanes, bars, waits, links, outages, ticks, shift} of what `lanesOf` found. Times have `shift` added: a
 * step of it moves all at once, so what is over is drawn once.
 */
export function layOut(found, width) {
	const span = found.shown_s;
	const scale = width / span;
	const base = Math.floor(found.from / 3600) * 3600;
	const x = (at) => (Math.min(Math.max(at, found.from), found.to) - base) * scale;
	const laid = { heads: [], lanes: [], bars: [], waits: [], links: [] };
	const places = { waits: new Map(), lanes: new Map() };
	let y = AXIS_PX;
	for (const model of found.models) {
		laid.heads.push({ title: model.title, y });
		y += HEAD_PX;
		for (const lane of model.lanes) y = placeLane(lane, model.model, y, x, laid, places);
		if (model.line.rows.length) y = placeLine(model, y, x, laid, places);
		y += MODEL_GAP_PX;
	}
	laid.links = [...linksOf(laid, places), ...handoverLinks(found, places, x)];
	const outages = found.outages.map((each) => ({ ...each, x: x(each.from), width: Math.max(2, x(each.to) - x(each.from)) }));
	return { ...laid, outages, ticks: ticksOf(span, scale, width), height: y, shift: Math.round(x(found.from)) };
}

function placeLane(lane, model, y, x, laid, places) {
	const top = y + ROOM_ABOVE_PX;
	places.lanes.set(`${model}/${lane.slot}`, top);
	laid.lanes.push({ slot: lane.number, y: top, height: BAR_PX, num_hidden: lane.num_hidden });
	for (const bar of lane.bars) laid.bars.push({ bar, lane: lane.key, y: top, height: BAR_PX, ...extent(bar, x) });
	const below = placeRows(lane.sidings, top + BAR_PX + 3, x, laid, places);
	return below + LANE_GAP_PX;
}

function placeLine(model, y, x, laid, places) {
	const { rows, num_hidden } = model.line;
	laid.lanes.push({ y: y + 2, height: SIDING_PX, is_line: true, num_hidden });
	return placeRows(rows, y + 2, x, laid, places);
}

function placeRows(rows, y, x, laid, places) {
	rows.forEach((row, number) => {
		for (const wait of row) {
			const place = { wait, y: y + number * SIDING_PX, height: SIDING_PX - 3, ...extent(wait, x) };
			laid.waits.push(place);
			places.waits.set(partKey(wait, wait.from), place);
			if (!wait.is_open) places.waits.set(partKey(wait, wait.to, "end"), place);
		}
	});
	return y + rows.length * SIDING_PX;
}

function extent(part, x) {
	const from = x(part.from);
	return { x: from, width: Math.max(1.5, x(part.to) - from) };
}

function partKey(part, at, which = "start") {
	return `${part.id}/${part.index}/${which}/${at}`;
}

/** From a bar down to its request's siding, and from a siding up to the bar that follows. */
function linksOf(laid, places) {
	const links = [];
	for (const { bar, x, y, height, width } of laid.bars) {
		if (bar.num > 1) continue;
		const background = bar.row.priority === "background";
		const before = places.waits.get(partKey(bar, bar.from, "end"));
		if (before) links.push({ kind: "in", background, x, from: before.y + before.height / 2, to: edge(before.y, y, height) });
		const after = places.waits.get(partKey(bar, bar.to));
		if (after) links.push({ kind: "out", background, x: x + width, from: edge(after.y, y, height), to: after.y + after.height / 2 });
	}
	return links;
}

function edge(siding_y, y, height) {
	return siding_y > y ? y + height : y;
}

function handoverLinks(found, places, x) {
	const links = [];
	for (const each of found.handovers) {
		const from = places.lanes.get(`${each.model}/${each.giver.slot}`);
		const to = places.lanes.get(`${each.model}/${each.taker.slot}`);
		if (from === undefined || to === undefined) continue;
		links.push({ kind: "handover", x: x(each.at), to_x: x(each.taker.from), from, to });
	}
	return links;
}

function ticksOf(span, scale, width) {
	const step_s = [5, 10, 15, 30, 60, 120, 300].find((step) => (span / step) * 62 <= width) ?? 300;
	const ticks = [];
	for (let ago = 0; ago <= span; ago += step_s) ticks.push({ x: width - ago * scale, ago });
	return ticks;
}
