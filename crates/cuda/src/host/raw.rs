//! Raw log-probabilities: of the logits before anything that belongs to a row. A row that asks for them is drawn as one that
//! does not; then its logits are stored once more without its transforms, in the same bits, and asked for their masses,
//! the largest of them, and those of the drawn tokens.

use crate::device::stored_rows::StoredRows;
use crate::error::CudaError;
use crate::host::stored_results::{StoredRequest, StoredResults};
use cudarc::driver::CudaStream;
use flash_sampling_core::{LogprobsMode, RowParams, Samples};
use std::sync::Arc;

/// A row of the same logits without transforms, whose log-probabilities are the raw ones of `row`; `None` where those are
/// not asked for.
pub(crate) fn bare(row: &RowParams<'_>) -> Option<RowParams<'static>> {
    let logprobs = row.logprobs.filter(|_| row.logprobs_mode == LogprobsMode::Raw)?;
    Some(RowParams { temperature: 0.0, logprobs: Some(logprobs), ..RowParams::default() })
}

/// Gives rows of `out`, which were drawn, their raw log-probabilities: row `rows[i]` those of row `i` of `stored`, which is
/// asked as `asked[i]`, a [`bare`] row.
pub(crate) fn note(
    rows: impl Iterator<Item = usize>,
    asked: &[StoredRequest],
    answers: &mut StoredResults,
    stored: &mut StoredRows,
    stream: &Arc<CudaStream>,
    out: &mut Samples,
) -> Result<(), CudaError> {
    answers.clear();
    answers.ask(asked, asked.iter().map(|_| Ok(())), false, None, stored, stream)?;
    for (i, row) in rows.enumerate() {
        let Ok(drawn) = out.row(row) else { continue };
        let logits = stored.read_some(i, drawn.draws.iter().map(|draw| draw.token), stream)?;
        let (Some(mass), top) = answers.extras(i) else {
            return Err(CudaError::Corrupt { what: "masses" });
        };
        out.set_raw(row, mass, top, logits.iter().copied());
    }
    Ok(())
}
