//! The speed of a batch (`--report`).

use crate::output::line;
use serde_json::json;
use std::io::{self, Write};
use std::time::Duration;

#[derive(Debug, Default)]
pub(super) struct Report {
    prompt_tokens: usize,
    /// Layers of the prompt.
    pub(super) prompt: Duration,
    /// Layers of the written tokens.
    pub(super) layers: Duration,
    /// Head and draw.
    pub(super) draw: Duration,
    /// The draft model.
    pub(super) draft: Duration,
    pub(super) tokens: u64,
    /// Draws with more than one pass, because of filters.
    pub(super) more_passes: u64,
    /// The rows of all calls, and the rows that read the weight although there is a shadow.
    pub(super) rows: usize,
    pub(super) fallback_rows: usize,
    has_shadow: bool,
    /// Draft tokens, and the accepted part of them.
    pub(super) proposed: u64,
    pub(super) accepted: u64,
}

impl Report {
    pub(super) fn new(prompt_tokens: usize, has_shadow: bool) -> Self {
        Report { prompt_tokens, has_shadow, ..Report::default() }
    }

    /// Seconds after the prompt, above 0.
    fn seconds(&self) -> f64 {
        (self.layers + self.draw + self.draft).as_secs_f64().max(1e-9)
    }

    fn rate(&self) -> f64 {
        self.tokens as f64 / self.seconds()
    }

    fn share(&self) -> f64 {
        self.draw.as_secs_f64() / self.seconds()
    }

    pub(super) fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let prompt = line::count(self.prompt_tokens, "token");
        writeln!(out, "\nprompt: {prompt} in {:.1} ms", 1e3 * self.prompt.as_secs_f64())?;
        writeln!(
            out,
            "output: {}, {:.1} per second; head and draw took {:.1}% of the time; {} took more than one pass",
            line::count(self.tokens, "token"),
            self.rate(),
            100.0 * self.share(),
            line::count(self.more_passes, "draw")
        )?;
        if self.has_shadow {
            let rows = line::count(self.rows, "row");
            writeln!(out, "shadow: {} of {rows} read the weight instead of the shadow", self.fallback_rows)?;
        }
        if self.proposed > 0 {
            let share = 100.0 * self.draft.as_secs_f64() / self.seconds();
            let (ahead, accepted) = (line::count(self.proposed, "token"), self.accepted);
            writeln!(out, "draft: {ahead}, of which {accepted} accepted; it took {share:.1}% of the time")?;
        }
        Ok(())
    }

    pub(super) fn json(&self) -> serde_json::Value {
        json!({ "report": {
            "prompt_tokens": self.prompt_tokens,
            "prompt_seconds": self.prompt.as_secs_f64(),
            "tokens": self.tokens,
            "tokens_per_second": self.rate(),
            "share_of_head_and_draw": self.share(),
            "draws_of_more_passes": self.more_passes,
            "rows": self.rows,
            "fallback_rows": self.fallback_rows,
            "drawn_ahead": self.proposed,
            "drawn_ahead_that_hold": self.accepted,
        } })
    }
}
