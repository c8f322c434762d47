//! Ctrl-C: finish what is in hand, then stop.

use crate::error::CommandError;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the user asked to stop. Clones share the answer.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Listens for Ctrl-C (and SIGTERM): the first asks to stop, a second stops at once.
    pub fn listen() -> Self {
        let interrupt = Interrupt::default();
        let asked = interrupt.clone();
        let installed = ctrlc::set_handler(move || {
            if asked.0.swap(true, Ordering::Relaxed) {
                std::process::exit(130);
            }
            tracing::info!("stopping after the call in hand; Ctrl-C again stops at once");
        });
        if let Err(error) = installed {
            tracing::warn!("Ctrl-C will stop at once, not cleanly: {error}");
        }
        interrupt
    }

    /// Whether it is time to stop.
    pub fn asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// To be called between steps of long work.
    ///
    /// # Errors
    /// [`CommandError::Interrupted`] when it is time to stop.
    pub fn check(&self) -> Result<(), CommandError> {
        if self.asked() { Err(CommandError::Interrupted) } else { Ok(()) }
    }
}
