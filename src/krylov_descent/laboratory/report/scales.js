"use strict";
// Where a value lies on an axis, which values deserve a tick, and how they are written.

function superscript(power) {
  return [...String(power)].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c])).join("");
}

// Three significant digits by default, and powers of ten as people write them.
function number(value, digits = 3) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 0.001 && size < 1e6) {
    const rounded = Number(value.toPrecision(digits));
    return rounded.toLocaleString("en", { maximumFractionDigits: 9 }).replace("-", "−");
  }
  const power = Math.floor(Math.log10(size) + 1e-9);
  const mantissa = Number((size / 10 ** power).toPrecision(digits));
  const times = mantissa === 1 ? "" : `${mantissa}·`;
  return `${value < 0 ? "−" : ""}${times}10${superscript(power)}`;
}

// A scale says where a value lies on an even axis, which range shows two values well, and which
// values between two places deserve a tick.
const linear = {
  place: (value) => value,
  range(low, high) {
    const space = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
    return [low >= 0 && low < 0.4 * high ? 0 : low - space, high + space];
  },
  ticks(from, to, count) {
    const rough = (to - from) / count;
    const ten = 10 ** Math.floor(Math.log10(rough));
    const step = ten * [1, 2, 5, 10].find((m) => m * ten >= rough * 0.999);
    const values = [];
    for (let i = Math.ceil(from / step - 1e-9); i * step <= to + step * 1e-9; i++) {
      values.push(Number((i * step).toPrecision(12)));
    }
    return values;
  },
};

const logarithmic = {
  // Zero has no place on this axis: it is drawn at the lower edge.
  place: (value) => (value > 0 ? Math.log10(value) : -Infinity),
  range(low, high) {
    const [a, b] = [Math.log10(low), Math.log10(high)];
    const space = (b - a) * 0.06 || 0.1;
    return [a - space, b + space];
  },
  ticks(from, to, count) {
    if (to - from < 0.8) return linear.ticks(10 ** from, 10 ** to, count);
    const stride = Math.max(1, Math.ceil((to - from) / count));
    const mantissas = to - from <= 3 ? [1, 2, 5] : [1];
    const values = [];
    for (let power = Math.floor(from); power <= to; power++) {
      if (power % stride === 0) values.push(...mantissas.map((m) => m * 10 ** power));
    }
    return values.filter((value) => Math.log10(value) >= from && Math.log10(value) <= to);
  },
};

// Logarithmic in both directions from zero; what is nearer to zero than `smallest` is drawn there.
function signedLogarithmic(smallest) {
  const place = (value) =>
    Math.sign(value) * (0.5 + Math.log10(Math.max(Math.abs(value), smallest) / smallest));
  return {
    place,
    range: (low, high) => [Math.min(place(low), 0) - 0.3, Math.max(place(high), 0) + 0.3],
    ticks(from, to, count) {
      const stride = Math.max(1, Math.ceil((to - from) / count));
      const values = [0];
      const first = Math.ceil(Math.log10(smallest) / stride) * stride;
      for (let power = first; power < 60; power += stride) {
        values.push(10 ** power, -(10 ** power));
      }
      return values.filter((value) => place(value) >= from && place(value) <= to);
    },
  };
}
