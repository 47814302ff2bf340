/** A line chart over time; its figures are told as text above it, so it is not only seen. */

import { html, useMemo, useState } from "../dom.js";
import { columnsOf } from "../state/series.js";
import { clockTime } from "../state/words.js";
import { Choice, useSize } from "./parts.js";

const SPANS = [
	["fine", "5 min"],
	["coarse", "1 h"],
];
const SPAN_S = { fine: 300, coarse: 3600 };
const TICK_S = { fine: 60, coarse: 600 };
const HEIGHT_PX = 132;
const BOX = { left: 56, right: 4, top: 8, bottom: 18 };

/** The choice of five minutes or an hour that the charts of a view share. */
export function useSpan() {
	const [span, setSpan] = useState("fine");
	return [span, html`<${Choice} label="Time shown" options=${SPANS} value=${span} onChange=${setSpan} />`];
}

/**
 * `lines` are {label, colour, dash, fill, of}: `of` gives a bucket's figure or null, `colour` is a custom property; `marks`
 * {at, label, colour} are levels. `words` makes text of a figure, `top` is the least top of the scale, `base` 1024 for bytes.
 */
export function Chart({ title, state, now, span, lines, words, marks = [], top = 0, base = 10 }) {
	const [box, width] = useSize();
	const [under, setUnder] = useState(null);
	const second = Math.floor(now);
	const { times, values } = useMemo(() => {
		const columns = Object.fromEntries(lines.map((line) => [line.label, line.of]));
		return columnsOf(state, span, second, columns);
	}, [second, span, lines, state.num_documents === 0]);
	const scale = scaleOf({ values, marks, top, base, width, second, span });
	const at = under !== null && under < times.length ? under : times.length - 1;
	const point = (event) => setUnder(nearest(times, scale.time(event.offsetX)));
	return html`<figure class="chart" aria-label=${summary(title, lines, values, words)}>
		<figcaption>
			<b>${title}</b>
			${lines.map((line) => html`<span class="legend"><i style=${{ borderTopColor: `var(${line.colour})` }} class=${line.dash ?? "solid"}></i>${line.label} <output>${words(values[line.label][at])}</output></span>`)}
			${under !== null && times[at] && html`<time>${clockTime(times[at])}</time>`}
		</figcaption>
		<div class="plot" ref=${box} aria-hidden="true">
			<svg width=${width} height=${HEIGHT_PX} onPointerMove=${point} onPointerLeave=${() => setUnder(null)}>
				<${Axes} scale=${scale} span=${span} second=${second} words=${words} />
				${marks.map((mark) => html`<g style=${{ color: `var(${mark.colour})` }}><path class="level-line" d="M${BOX.left} ${scale.y(mark.at)} H${scale.right}" /><text x=${BOX.left + 4} y=${scale.y(mark.at) - 3}>${mark.label}</text></g>`)}
				${lines.map((line) => html`<${Curve} key=${line.label} line=${line} times=${times} figures=${values[line.label]} scale=${scale} />`)}
				${under !== null && times[at] && html`<path class="cursor" d="M${scale.x(times[at])} ${BOX.top} V${scale.bottom}" />`}
			</svg>
		</div>
	</figure>`;
}

function summary(title, lines, values, words) {
	const told = lines.map(({ label }) => {
		const figures = values[label].filter((each) => each !== null);
		if (!figures.length) return `${label}: none`;
		return `${label}: now ${words(figures.at(-1))}, highest ${words(Math.max(...figures))}`;
	});
	return `${title}. ${told.join("; ")}`;
}

function scaleOf({ values, marks, top, base, width, second, span }) {
	const figures = Object.values(values).flat();
	const high = Math.max(0, ...figures);
	const most = Math.max(top, high * 1.06, ...marks.map((mark) => mark.at * 1.04)) || 1;
	const bottom = HEIGHT_PX - BOX.bottom;
	const right = width - BOX.right;
	const from = second - SPAN_S[span];
	const per_s = (right - BOX.left) / SPAN_S[span];
	return {
		...{ most, bottom, right, step: stepOf(most, base) },
		x: (at) => BOX.left + Math.max(0, at - from) * per_s,
		y: (figure) => bottom - (figure / most) * (bottom - BOX.top),
		time: (x) => from + (x - BOX.left) / per_s,
	};
}

/** The distance of lines across: round, and three or four of them. */
function stepOf(most, base) {
	const unit = base ** Math.floor(Math.log(most) / Math.log(base));
	const steps = base === 10 ? [0.1, 0.2, 0.5, 1, 2, 5, 10] : [0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512];
	return unit * (steps.find((each) => most / (unit * each) <= 4) ?? base);
}

function Axes({ scale, span, second, words }) {
	const levels = [];
	for (let figure = 0; figure <= scale.most; figure += scale.step) levels.push(figure);
	const times = [];
	for (let at = Math.ceil((second - SPAN_S[span]) / TICK_S[span]) * TICK_S[span]; at <= second; at += TICK_S[span]) times.push(at);
	return html`<g class="axes">
		${levels.map((figure) => html`<path d="M${BOX.left} ${scale.y(figure)} H${scale.right}" /><text class="right" x=${BOX.left - 6} y=${scale.y(figure) + 4}>${words(figure)}</text>`)}
		${times.map((at) => scale.x(at) < scale.right - 14 && scale.x(at) > BOX.left + 14 && html`<text class="middle" x=${scale.x(at)} y=${HEIGHT_PX - 4}>${clockTime(at).slice(0, 5)}</text>`)}
	</g>`;
}

function Curve({ line, times, figures, scale }) {
	let path = "";
	let area = "";
	let begun = null;
	const closed = () => (begun === null ? "" : `V${scale.bottom} H${begun} Z`);
	figures.forEach((figure, number) => {
		if (figure === null) {
			area += closed();
			begun = null;
			return;
		}
		const x = scale.x(times[number]).toFixed(1);
		const to = `${begun === null ? "M" : "L"}${x} ${scale.y(figure).toFixed(1)}`;
		begun ??= x;
		path += to;
		area += to;
	});
	area += closed();
	return html`<g style=${{ color: `var(${line.colour})` }}>
		${line.fill && html`<path class="area" d=${area} />`}<path class="curve ${line.dash ?? ""}" d=${path} />
	</g>`;
}

function nearest(times, at) {
	return times.reduce((best, each, number) => (Math.abs(each - at) < Math.abs(times[best] - at) ? number : best), 0);
}
