//! The marks of calls that do not wait.
//!
//! A mark is a digest of a call. An exchange compares the marks of all ranks, so ranks notice that their calls differ.

use crate::abi::RowColumns;
use flash_sampling_core::backend::digest::of_words;
use flash_sampling_core::{DType, Knob};

/// The first word of a mark. With this word, marks of calls that do not wait differ from marks of calls that wait.
const MARK: u64 = u64::from_le_bytes(*b"enqueue\0");

/// Returns the mark of a launch for some rows of a call.
///
/// `first` is the index of the launch's first row, and `count` is the number of rows of the call. Marks differ if ranks
/// differ in one of these:
/// * the arrays that are present, and the number of words of a mask,
/// * whether a parameter or result needs all logits of a row (`whole_row`),
/// * the type of the hidden states,
/// * the planned number of adjusted tokens,
/// * `first` and `count`.
pub(super) fn mark_of(
    (columns, whole_row): (&RowColumns, Option<Knob>),
    (dtype, max_adjusted): (DType, usize),
    (first, count): (usize, usize),
) -> u64 {
    let words = [MARK, dtype.code().into(), max_adjusted as u64, first as u64, count as u64];
    let arrays = [presence(columns), columns.mask_words.into(), whole_row.is_some().into()];
    of_words(words.into_iter().chain(arrays))
}

/// Returns one bit for each array: 1 if the array is present.
fn presence(columns: &RowColumns) -> u64 {
    let &RowColumns { logit_bias, banned, stop_tokens, prompt, output, .. } = columns;
    let present = [
        columns.index.is_null(),
        columns.seed.is_null(),
        columns.position.is_null(),
        columns.temperature.is_null(),
        columns.top_k.is_null(),
        columns.top_p.is_null(),
        columns.min_p.is_null(),
        columns.repetition_penalty.is_null(),
        columns.frequency_penalty.is_null(),
        columns.presence_penalty.is_null(),
        columns.min_tokens.is_null(),
        columns.mask.is_null(),
        logit_bias.tokens.is_null(),
        banned.tokens.is_null(),
        stop_tokens.tokens.is_null(),
        prompt.tokens.is_null(),
        output.tokens.is_null(),
    ];
    present.into_iter().fold(0, |bits, is_null| bits << 1 | u64::from(!is_null))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{DeviceAddress, TokenLists};

    #[test]
    fn marks_differ_if_calls_do() {
        let bare = RowColumns::default();
        let lists = TokenLists { tokens: DeviceAddress::new(4), ..TokenLists::default() };
        let mark = |columns, dtype, max_adjusted, of| mark_of((columns, None), (dtype, max_adjusted), of);
        let marks = [
            mark(&bare, DType::BF16, 0, (0, 9)),
            mark(&bare, DType::F16, 0, (0, 9)),
            mark(&bare, DType::BF16, 8, (0, 9)),
            mark(&bare, DType::BF16, 0, (4, 9)),
            mark(&bare, DType::BF16, 0, (0, 8)),
            mark(&RowColumns { seed: DeviceAddress::new(8), ..bare }, DType::BF16, 0, (0, 9)),
            mark(&RowColumns { banned: lists, ..bare }, DType::BF16, 0, (0, 9)),
            mark(&RowColumns { output: lists, ..bare }, DType::BF16, 0, (0, 9)),
            mark(&RowColumns { mask_words: 4, ..bare }, DType::BF16, 0, (0, 9)),
            mark_of((&bare, Some(Knob::Kept)), (DType::BF16, 0), (0, 9)),
        ];
        for (i, mark) in marks.iter().enumerate() {
            assert!(!marks[..i].contains(mark), "{i}");
        }
    }

    /// The arrays of two ranks are in different memory, so their addresses differ.
    #[test]
    fn marks_do_not_depend_on_addresses() {
        let at = |address| RowColumns { seed: DeviceAddress::new(address), ..RowColumns::default() };
        let mark = |columns: RowColumns| mark_of((&columns, None), (DType::BF16, 0), (0, 9));
        assert_eq!(mark(at(8)), mark(at(64)));
    }
}
