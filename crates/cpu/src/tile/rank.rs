//! The tokens of a tile that can reach a cut, one by one.

use crate::dot::TILE;
use crate::perturb::perturb;
use crate::words::{Lanes, SPAN};
use flash_sampling_core::params::Row;
use flash_sampling_core::{Candidate, Winner};

/// Offers the tokens of a tile that can reach `cut`, perturbed or greedy.
///
/// # Safety
/// The instruction set of `L` is available.
#[inline(always)]
pub(super) unsafe fn draw_tile<L: Lanes>(
    row: &Row<'_>,
    draw: u32,
    first: u32,
    spans: &[[f32; SPAN]],
    tops: &[f32; TILE / SPAN + 1],
    cut: f32,
    offer: impl FnMut(Candidate) -> f32,
) {
    let top = tops.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if !row.greedy {
        // SAFETY: by this function's contract.
        unsafe { perturb::<L>((&row.noise, draw), first, spans, top, cut, |_| false, offer) };
    } else if top >= cut {
        // SAFETY: by this function's contract.
        unsafe { rank::<L>(first, spans, tops, cut, offer) };
    }
}

/// Offers the logits that reach `cut` as their own scores; `tops` are the largest of each span.
///
/// # Safety
/// The instruction set of `L` is available.
#[inline(always)]
pub(super) unsafe fn rank<L: Lanes>(
    first: u32,
    spans: &[[f32; SPAN]],
    tops: &[f32; TILE / SPAN + 1],
    mut cut: f32,
    mut offer: impl FnMut(Candidate) -> f32,
) {
    for ((span, &top), first) in spans.iter().zip(tops).zip((first..).step_by(SPAN)) {
        if top < cut {
            continue;
        }
        // SAFETY: by this function's contract. Above -inf.
        let mut hits = unsafe { L::at_least(span, cut.max(f32::MIN)) };
        while hits != 0 {
            let i = hits.trailing_zeros();
            hits &= hits - 1;
            let logit = span[i as usize];
            if logit >= cut {
                cut = offer(Candidate { winner: Winner::new(logit, first + i), logit });
            }
        }
    }
}
