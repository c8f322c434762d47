//! Encodes the adjustments of a row for the kernels: biases, followed by penalties if the row has any.

use crate::abi::{LogitBias, PENALISED, Penalty};
use crate::error::CudaError;
use crate::sampler::pinned_items::PinnedItems;
use flash_sampling_core::RowParams;
use flash_sampling_core::backend::Adjustment;

/// The list of a row's biases and penalties.
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    /// The number of entries before this list.
    pub(super) at: u64,
    /// The value for [`Row::biases`].
    pub(super) biases: u32,
    pub(super) largest_bias: f32,
}

/// Writes adjustments as biases and as penalties. Returns the smallest penalty values and the largest bias, at least 0.
///
/// Four lanes hide the latency of the running minimum.
fn split(adjustments: &[Adjustment], biases: &mut [u64], penalties: &mut [u64]) -> (Penalty, f32) {
    let (mut repetition, mut subtract, mut bias) = ([1.0f32; 4], [0.0f32; 4], [0.0f32; 4]);
    let mut note = |lane: usize, a: &Adjustment, to: &mut u64, penalty: &mut u64| {
        *to = bytemuck::cast(LogitBias { token: a.token, value: a.bias });
        *penalty = bytemuck::cast(Penalty { repetition: a.repetition, subtract: a.subtract });
        repetition[lane] = if a.repetition < repetition[lane] { a.repetition } else { repetition[lane] };
        subtract[lane] = if a.subtract < subtract[lane] { a.subtract } else { subtract[lane] };
        bias[lane] = if a.bias > bias[lane] { a.bias } else { bias[lane] };
    };
    let (blocks, rest) = adjustments.as_chunks::<4>();
    let (bias_blocks, bias_rest) = biases.as_chunks_mut::<4>();
    let (penalty_blocks, penalty_rest) = penalties.as_chunks_mut::<4>();
    for ((block, biases), penalties) in blocks.iter().zip(bias_blocks).zip(penalty_blocks) {
        (0..4).for_each(|lane| note(lane, &block[lane], &mut biases[lane], &mut penalties[lane]));
    }
    let rest = rest.iter().zip(bias_rest).zip(penalty_rest);
    rest.enumerate().for_each(|(lane, ((a, bias), penalty))| note(lane, a, bias, penalty));
    let least = |lanes: [f32; 4]| lanes.into_iter().fold(f32::INFINITY, f32::min);
    (Penalty { repetition: least(repetition), subtract: least(subtract) }, bias.into_iter().fold(0.0, f32::max))
}

/// Whether a row's list may have penalties beyond biases, for any tokens.
pub(super) fn may_penalise(row: &RowParams<'_>) -> bool {
    let subtracts = [row.frequency_penalty, row.presence_penalty, row.dry_multiplier].iter().any(|&value| value != 0.0);
    row.history.is_some() && (row.repetition_penalty != 1.0 || subtracts && !row.logit_bias.is_empty())
}

/// The bias equal to an adjustment, if one exists. A subtraction without other changes is a bias.
fn as_bias(a: &Adjustment) -> Option<LogitBias> {
    let alone = |value| Some(LogitBias { token: a.token, value });
    match a {
        _ if a.bias == f32::NEG_INFINITY => alone(a.bias),
        _ if a.repetition != 1.0 => None,
        _ if a.subtract == 0.0 => alone(a.bias),
        _ if a.bias == 0.0 => alone(-a.subtract),
        _ => None,
    }
}

/// Appends a row's adjustments, as biases only if possible.
pub(super) fn push(adjustments: &[Adjustment], lists: &mut PinnedItems) -> Result<List, CudaError> {
    let (at, len) = (lists.len(), adjustments.len());
    let (place, count) = (at as u64, len as u32);
    if len == 0 {
        return Ok(List { at: place, biases: 0, largest_bias: 0.0 });
    }
    let mut largest_bias = 0.0f32;
    let biases = lists.grow(len, at)?;
    let alone = biases.iter_mut().zip(adjustments.iter().map_while(as_bias)).map(|(to, bias)| {
        *to = bytemuck::cast(bias);
        largest_bias = largest_bias.max(bias.value);
    });
    if alone.count() == len {
        return Ok(List { at: place, biases: count, largest_bias });
    }
    let (biases, rest) = lists.grow(len + 1, at)?.split_at_mut(len);
    let (first, penalties) = rest.split_at_mut(1);
    let (least, largest_bias) = split(adjustments, biases, penalties);
    first[0] = bytemuck::cast(least);
    Ok(List { at: place, biases: count | PENALISED, largest_bias })
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_sampling_core::History;
    use flash_sampling_core::backend::Adjustments;

    #[test]
    fn what_is_a_bias_and_no_more_is_one() {
        let of =
            |bias, repetition, subtract| as_bias(&Adjustment { token: 1, bias, repetition, subtract }).map(|b| b.value);
        assert_eq!(of(0.5, 1.0, 0.0), Some(0.5));
        assert_eq!(of(0.0, 1.0, 0.5), Some(-0.5));
        assert_eq!(of(f32::NEG_INFINITY, 2.0, 3.0), Some(f32::NEG_INFINITY));
        assert_eq!((of(0.5, 1.0, 0.5), of(0.0, 2.0, 0.0)), (None, None));
    }

    #[test]
    fn bounds_are_those_of_every_item() {
        let bounds = |items: &[Adjustment]| {
            let mut lists = [vec![0; items.len()], vec![0; items.len()]];
            let [biases, penalties] = &mut lists;
            let bounds = split(items, biases, penalties);
            for ((item, bias), penalty) in items.iter().zip(biases).zip(penalties) {
                let bias: LogitBias = bytemuck::cast(*bias);
                let Penalty { repetition, subtract } = bytemuck::cast(*penalty);
                assert_eq!(*item, Adjustment { token: bias.token, bias: bias.value, repetition, subtract });
            }
            bounds
        };
        for len in 0..20usize {
            for at in 0..len {
                let mut items = vec![Adjustment::bias(1, -1.0); len];
                items[at] = Adjustment { token: 1, bias: 3.0, repetition: 0.5, subtract: -2.0 };
                assert_eq!(bounds(&items), (Penalty { repetition: 0.5, subtract: -2.0 }, 3.0), "{at} of {len}");
            }
            let none = (Penalty { repetition: 1.0, subtract: 0.0 }, 0.0);
            assert_eq!(
                bounds(&vec![Adjustment { subtract: 1.0, repetition: 2.0, ..Adjustment::bias(1, -1.0) }; len]),
                none
            );
        }
    }

    #[test]
    fn lists_are_more_than_biases_only_where_a_row_may_penalise() {
        let mut history = History::new(&[1, 2, 3, 1, 2]);
        history.extend([3, 1]);
        let mut of_each = [0; 2];
        for case in 0..64u32 {
            let is = |bit: u32| case >> bit & 1 == 1;
            let value = |bit: u32| f32::from(u8::from(is(bit))) / 2.0;
            let row = RowParams {
                history: is(0).then_some(&history),
                repetition_penalty: 1.0 + value(1),
                frequency_penalty: value(2),
                presence_penalty: value(3),
                dry_multiplier: value(4),
                logit_bias: if is(5) { &[(3, 1.0)] } else { &[] },
                ..RowParams::default()
            };
            let mut adjustments = Adjustments::default();
            adjustments.collect([&row]);
            let is_penalised = adjustments.row(0).iter().any(|a| as_bias(a).is_none());
            assert!(!is_penalised || may_penalise(&row), "{row:?}");
            of_each[usize::from(is_penalised)] += 1;
        }
        assert!(of_each.iter().all(|&count| count > 8), "{of_each:?}");
    }
}
