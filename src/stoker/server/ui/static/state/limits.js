/** Bounds of everything the page keeps. Past each the oldest goes. */

export const MAX_ENDED = 10000; // requests in the history
export const MAX_MOVES = 64; // of one request
export const MAX_WITH_MOVES = 1000; // of these, those that keep all moves
export const MAX_OLD_MOVES = 12; // of every older one, its first and last
export const MAX_LIVE = 4096; // requests that have not ended
export const MAX_MEMBERS = 256; // of calls that have ended, for the lanes
export const MAX_NOTICES = 128;
export const MAX_ENGINE_MOVES = 64;
export const MAX_MODELS = 64;
export const MAX_LANES = 512;
export const MAX_MACHINES = 256;
export const FINE_STEP_S = 1;
export const FINE_SPAN_S = 300;
export const COARSE_STEP_S = 10;
export const COARSE_SPAN_S = 3600;
export const LANES_SPAN_S = 300;
