// Plots over time and curves, drawn by uPlot on a canvas. Each has a text that says the same to screen readers.

import { html, useEffect, useRef } from "./vendor/htm-preact.js";
import { axisTime } from "./format.js";

const HEIGHT = 180;
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const COLORS = ["--plot-1", "--plot-2", "--plot-3", "--plot-4", "--plot-5"];

// Each line of a stacked plot is drawn on top of the sum of the lines before it.
function stacked(lines) {
  const sums = [];
  return lines.map((values) =>
    values.map((value, i) => {
      sums[i] = (sums[i] || 0) + (value || 0);
      return sums[i];
    }),
  );
}

function seriesOf({ names, isStacked, format }) {
  const series = names.map((label, i) => {
    const stroke = color(COLORS[i % COLORS.length]);
    return {
      label,
      stroke,
      width: 1.5,
      spanGaps: false,
      fill: isStacked ? stroke : undefined,
      points: { show: false },
      value: (_, value) => (value === null || value === undefined ? "–" : format(value)),
    };
  });
  return isStacked ? series.reverse() : series;
}

function optionsOf(props, width) {
  const axis = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false } };
  const xAxis = { ...axis, size: 28, space: 70, ...(props.xFormat ? { incrs: [1, 2, 4, 8] } : {}), values: (_, values) => values.map(props.xFormat || axisTime) };
  return {
    width,
    height: HEIGHT,
    padding: [8, 24, 0, 0],
    legend: { show: false },
    cursor: { y: false, points: { size: 6 } },
    scales: { x: { time: !props.xFormat }, y: { range: (_, __, high) => [0, props.yMax || Math.max(high * 1.05, 1e-6)] } },
    axes: [xAxis, { ...axis, size: 62, values: (_, values) => values.map(props.format) }],
    series: [{}, ...seriesOf(props)],
    hooks: props.mark ? { draw: [(plot) => drawMark(plot, props.mark)] } : {},
  };
}

function drawMark(plot, mark) {
  const x = plot.valToPos(mark.x, "x", true);
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = color("--accent");
  ctx.fillStyle = color("--text");
  ctx.setLineDash([4, 4]);
  ctx.beginPath();
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
  ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
  const isLeft = x < bbox.left + bbox.width / 2;
  ctx.textAlign = isLeft ? "left" : "right";
  ctx.fillText(mark.text, x + (isLeft ? 6 : -6), bbox.top + bbox.height - 8 * devicePixelRatio);
  ctx.restore();
}

function dataOf({ times, lines, isStacked }) {
  return isStacked ? [times, ...stacked(lines).reverse()] : [times, ...lines];
}

const lastOf = (values) => {
  for (let i = values.length - 1; i >= 0; i -= 1) if (values[i] !== null && values[i] !== undefined) return values[i];
  return null;
};

// `times` and each of `lines` have the same length; `names` and `format` describe the lines. `height` of all plots is the same.
export function Plot(props) {
  const { title, names, lines, times, format, theme, mark } = props;
  const box = useRef(null);
  const plot = useRef(null);
  const latest = useRef(props);
  latest.current = props;
  const isEmpty = !times.length || lines.every((values) => lastOf(values) === null);
  const shape = `${theme}/${names.join()}/${props.isStacked}/${mark ? `${mark.x} ${mark.text}` : ""}/${isEmpty}`;
  useEffect(() => {
    if (isEmpty) return undefined;
    const width = Math.max(200, box.current.clientWidth);
    plot.current = new window.uPlot(optionsOf(latest.current, width), dataOf(latest.current), box.current);
    const watcher = new ResizeObserver(() => {
      plot.current.setSize({ width: Math.max(200, box.current.clientWidth), height: HEIGHT });
    });
    watcher.observe(box.current);
    return () => {
      watcher.disconnect();
      plot.current.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => {
    if (plot.current) plot.current.setData(dataOf(latest.current));
  }, [times, lines]);
  const words = names.map((name, i) => `${name} ${lastOf(lines[i]) === null ? "unknown" : format(lastOf(lines[i]))}`).join(", ");
  return html`<figure class="plot">
    <figcaption>
      <span>${title}</span>
      <span class="keys">${names.length > 1 && names.map((name, i) => html`<span class=${`key key-${i + 1}`}>${name}</span>`)}</span>
    </figcaption>
    ${isEmpty
      ? html`<div class="plot-empty">No data yet.</div>`
      : html`<div ref=${box} class="plot-box" role="img" aria-label=${`${title}: ${words}`}></div>`}
  </figure>`;
}
