//! A list of row parameters that keeps its memory from step to step.

use super::RowParams;
use crate::sampler::reuse_vec;

/// Memory for the row parameters of one call at a time.
///
/// A plain `Vec` cannot outlive a step, because its rows borrow from requests and histories, which change.
#[derive(Debug, Default)]
pub struct RowBuffer(Vec<RowParams<'static>>);

impl RowBuffer {
    /// Collects rows, and calls `call` with them.
    pub fn with<'a, R>(
        &mut self,
        rows: impl IntoIterator<Item = RowParams<'a>>,
        call: impl FnOnce(&[RowParams<'a>]) -> R,
    ) -> R {
        let mut list = reuse_vec(core::mem::take(&mut self.0));
        list.extend(rows);
        let result = call(&list);
        self.0 = reuse_vec(list);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_stays_where_it_is() {
        let mut buffer = RowBuffer::default();
        let mut place = |count: u64| {
            let bias = [(3, 1.0)];
            let rows = (0..count).map(|position| RowParams { position, logit_bias: &bias, ..RowParams::default() });
            buffer.with(rows, |rows| {
                assert_eq!(rows.last().map(|row| row.position), count.checked_sub(1));
                rows.as_ptr() as usize
            })
        };
        let first = place(40);
        assert_eq!((place(0), place(40), place(7)), (first, first, first));
    }
}
